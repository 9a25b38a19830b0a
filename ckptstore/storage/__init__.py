"""Where objects lie: local disks, buckets, and what fsspec knows."""
