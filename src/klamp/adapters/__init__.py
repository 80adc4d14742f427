"""Where klamp meets other trainers: one module or package per purpose, the hosts' documented ways only."""
