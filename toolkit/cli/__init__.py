"""Command line: the top layer of the toolkit, and the only one that imports typer."""
