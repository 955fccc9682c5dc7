"""What lives where: byte budget, KV pages, adapter storage and tables, static step buffers."""
