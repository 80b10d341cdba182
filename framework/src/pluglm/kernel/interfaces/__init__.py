"""The contracts, one per file. A plugin author reads the one it implements; nothing here has behaviour."""
