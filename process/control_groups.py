"""The control groups that limit this process."""

from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's groups for a controller, the innermost first.

    They are of version 2, or else of version 1 (cgroups(7)). In a container the path of /proc may be the host's, and
    the group itself is mounted on top: what is not there is passed over, and the top is always looked at.
    """
    file = root / "proc/self/cgroup"
    if not file.exists():
        return []
    entries = [line.split(":", 2) for line in file.read_text().splitlines()]
    own = [path for _, controllers, path in entries if controller in controllers.split(",")]
    mount = root / "sys/fs/cgroup" / (controller if own else "")
    paths = own or [path for number, _, path in entries if number == "0"]
    return [folder for path in paths for folder in _upward(mount, path) if folder.is_dir()]


def _upward(mount: Path, path: str) -> list[Path]:
    inner = mount / path.strip("/")
    return [inner, *(parent for parent in inner.parents if parent.is_relative_to(mount))]
