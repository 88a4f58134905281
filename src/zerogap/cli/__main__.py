"""`python -m zerogap.cli` is the `zerogap` command."""

import sys

from zerogap.cli.main import main

sys.exit(main())
