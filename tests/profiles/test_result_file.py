"""What a result says of where it comes from."""

import shutil
import subprocess

import pytest

from profiles.result_file import provenance

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(directory, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", directory, *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def head(tmp_path, monkeypatch):
    """The commit of a repository, where the code is."""
    monkeypatch.setattr("profiles.result_file.CODE", tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "status.showUntrackedFiles", "no")
    (tmp_path / "code.py").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=a")
    return git(tmp_path, "rev-parse", "HEAD")


def test_the_commit_is_the_codes(head, tmp_path):
    results = tmp_path / "profiles" / "results"
    results.mkdir(parents=True)
    (results / "a.json").write_text("{}")
    assert provenance(None)["commit"] == head
    (tmp_path / "new.py").write_text("")
    assert provenance(None)["commit"] == f"{head}-dirty"
    (tmp_path / "new.py").unlink()
    (tmp_path / "code.py").write_text("changed")
    assert provenance(None)["commit"] == f"{head}-dirty"
    assert provenance("said")["commit"] == "said"


def test_without_a_repository(tmp_path, monkeypatch):
    monkeypatch.setattr("profiles.result_file.CODE", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance(None)["commit"] == "unknown"
