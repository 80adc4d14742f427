"""One self-contained HTML page of one or several runs: data in, one string out."""
