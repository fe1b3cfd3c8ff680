import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.compare.compare import main

if __name__ == "__main__":
    sys.exit(main())
