"""Models outside the federation, a client's or the server's: written by export, used by predict."""
