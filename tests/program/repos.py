"""Git repositories for tests."""

import subprocess
from pathlib import Path

IDENTITY = ("-c", "user.name=Me", "-c", "user.email=me@example.org", "-c", "protocol.file.allow=always")


def git(repo: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(repo), *IDENTITY, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def new_repo(root: Path, **files: str) -> Path:
    """A repository with one commit; `a__b` names the file a/b, and each file is a Python file."""
    root.mkdir(parents=True)
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root
