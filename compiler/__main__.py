"""python -m compiler: the same as planc."""

import sys

from compiler.cli import main

sys.exit(main())
