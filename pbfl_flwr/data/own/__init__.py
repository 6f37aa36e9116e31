"""A device's own data: image folders, archives, tables, texts, HtFLlib directories."""
