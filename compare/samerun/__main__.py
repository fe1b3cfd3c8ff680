import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # in place, without installation

from samerun.command_line import main

if __name__ == "__main__":
    sys.exit(main())
