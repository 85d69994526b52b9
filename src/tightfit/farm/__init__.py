"""Many prompts over many machines: leases in a shared folder, every answer once."""
