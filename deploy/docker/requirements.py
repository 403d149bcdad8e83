"""Prints what `pip install -r` needs for some extras of pyproject.toml, so that an image can cache it apart from code.

Usage: requirements.py pyproject.toml [EXTRA …]
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
wanted = list(project["dependencies"])
for extra in sys.argv[2:]:
    wanted += project["optional-dependencies"][extra]
sys.stdout.write("\n".join(dict.fromkeys(wanted)) + "\n")
