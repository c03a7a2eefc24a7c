"""prefetchd: a predictive staging engine for KV caches on NVMe."""
