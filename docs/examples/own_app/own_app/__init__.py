"""An app of my own: the methods of pbfl-flwr on data of my own."""
