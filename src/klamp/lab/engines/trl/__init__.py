"""`klamp train --backend trl`: TRL's arguments, and the program that is built from them."""
