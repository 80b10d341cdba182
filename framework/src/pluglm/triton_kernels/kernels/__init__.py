"""The device code. Importing a module of this package imports triton; the launchers beside it do so when called."""
