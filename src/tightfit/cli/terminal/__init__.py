"""How text leaves: the console, tables, notes, JSON, harmless names, bars."""
