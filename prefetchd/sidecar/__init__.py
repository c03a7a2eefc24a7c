"""The runtime behind a Unix socket: one daemon, many engines, pages read in place."""
