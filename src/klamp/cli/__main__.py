"""`python -m klamp.cli` is `klamp`; `accelerate launch -m klamp.cli train ...` runs it in several processes."""

import sys

from klamp.cli import main

sys.exit(main())
