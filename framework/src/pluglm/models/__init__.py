"""Model families: one file a family, and the decoder parts they share. Families are found by entry point, not here."""
