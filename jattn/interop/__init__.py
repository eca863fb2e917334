"""Other libraries' ways to call attention, under jattn's contract."""
