"""Numbers and tables as text: for the terminal, Markdown, CSV and LaTeX."""
