"""A device's own data: image folders, archives, tables, HtFLlib directories."""
