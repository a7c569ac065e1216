"""shardlab: distributed training by configuration. ARCHITECTURE.md is the map."""
