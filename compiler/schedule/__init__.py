"""Pipeline schedules, buckets and instruction streams."""
