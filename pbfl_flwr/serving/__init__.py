"""A client's personalised model outside the federation: written once by export, used by predict."""
