"""Buckets: objects of a store at S3, Google Cloud Storage or Azure, or wherever fsspec leads."""
