"""The sandbox ("walls") of programs that a model wrote, from the kernel features that this user may
use: namespaces, Landlock, seccomp and another user id.

It runs in the process that starts programs (`launcher.py`): `raise_walls` once, and `enter` in each
program's process before the program starts. Where the kernel refuses a wall, `Walls.missing` says
what a program can do. Only Linux has them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

__all__ = [
    "KINDS",
    "MAX_FILE_BYTES",
    "MAX_FOLDER_BYTES",
    "SHARED",
    "SharedFolder",
    "Walls",
    "enter",
    "raise_walls",
]

KINDS = ("user", "namespaces", "landlock", "seccomp")
"""Kinds of walls; tests leave them out one by one."""
MAX_FILE_BYTES = 1 << 26
MAX_FOLDER_BYTES = 1 << 28
_MAX_FILES = 1 << 14
_MAX_OPEN_FILES = 256
_MAX_PROCESSES = 64
SHARED = "work"
"""Name of the folder in which programs of a shared folder start."""
_FIRST_USER, _NUM_USERS = 61184, 4336
"""User ids that systemd reserves for temporary users (DynamicUser), so no real user has them."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Walls:
    """The walls that are in place."""

    user: bool = False
    """Programs run as a user that owns nothing. Only root can do that."""
    is_root: bool = False
    """Programs run as root, whose processes no limit counts."""
    outranked: bool = False
    """Other processes of this user have capabilities, which programs lack."""
    namespaces: bool = False
    """Programs have their own network, process table and mounts."""
    own_proc: bool = False
    """`/proc` shows only that process table."""
    tmpfs: bool = False
    """The folder of a program is a file system in memory, which ends with the program."""
    read_only: bool = False
    """All other file systems are read-only: files, permissions and times."""
    landlock: int = 0
    """Version of Landlock; 0: none."""
    seccomp: bool = False
    """System calls that reach other processes or a network are refused."""

    @property
    def missing(self) -> dict[str, str]:
        """By name of a missing wall: what programs can do without it."""
        is_hidden = self.namespaces or self.user or self.outranked or self.landlock > 0
        is_isolated = self.namespaces or self.user or self.seccomp
        sockets = "sockets of this host that are files" if self.namespaces else "the network"
        walls = {
            "secrets": (
                is_hidden and is_isolated,
                "read the environment of your other processes, and read and change their memory",
            ),
            "signals": (is_isolated, "end your other processes"),
            "network": (self.seccomp, f"use {sockets}"),
            "files": (
                self.landlock > 0 and (self.read_only or self.user or self.seccomp),
                "read and write the files that your user can",
            ),
            "disk": (self.tmpfs, f"fill the disk, with files of {MAX_FILE_BYTES >> 20} MiB each"),
            "forks": (
                self.user or (self.namespaces and not self.is_root),
                "start many processes before they are counted, twice a second",
            ),
        }
        return {name: text for name, (is_up, text) in walls.items() if not is_up}


# ---- raised once, by the process that starts programs --------------------------------------------


def raise_walls(folder: str, refused: Collection[str] = ()) -> Walls:
    """Raise the walls that children of this process inherit, and find out which others they can
    raise themselves. `refused` are KINDS to leave out.

    With namespaces it continues in a child, the first process of a new process table: this process
    waits for the child, and ends with it.
    """
    if sys.platform != "linux":
        return Walls()
    _end_with_parent()
    has_capabilities = _has_capabilities()
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory is exhausted, the kernel kills programs before the trainer
    is_other = "user" not in refused and os.geteuid() == 0 and _become_nobody(folder)
    _end_with_parent()  # again, since a change of the user resets it
    has_own_proc = has_tmpfs = is_read_only = False
    has_namespaces = "namespaces" not in refused and _enter_namespaces()
    if has_namespaces:
        has_own_proc = _mount("proc", "/proc", "proc", "")
        has_tmpfs = _mount_folder(folder)
        if has_tmpfs:
            _libc.umount2(folder.encode(), 0)
            is_read_only = _make_read_only()
    else:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _drop_capabilities()
    _prctl(_PR_SET_DUMPABLE, 0)  # else a program could read the memory of this process and siblings
    return Walls(
        user=is_other,
        is_root=os.geteuid() == 0,
        outranked=has_capabilities,
        namespaces=has_namespaces,
        own_proc=has_own_proc,
        tmpfs=has_tmpfs,
        read_only=is_read_only,
        landlock=0 if "landlock" in refused else _landlock_version(),
        seccomp="seccomp" not in refused and _has_seccomp(),
    )


def _has_capabilities() -> bool:
    with open("/proc/self/status") as file:
        return any(line.startswith("CapPrm:") and int(line[7:], 16) for line in file)


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become_nobody(folder: str) -> bool:
    """Change from root to a user that owns nothing; False where that is refused, or where such a
    user could not read Python or reach the folder."""
    user = _FIRST_USER + os.getpid() % _NUM_USERS
    folders = [os.path.dirname(os.__file__), *filter(os.path.isdir, sys.path)]
    try:
        os.setgroups([])
        os.setegid(user)
        os.seteuid(user)
        for path in folders:
            os.listdir(path)
        os.stat(folder)
        is_readable = os.access(sys.executable, os.X_OK, effective_ids=True)
    except OSError:
        is_readable = False
    with suppress(OSError):
        os.seteuid(0)
        os.setegid(0)
    if not is_readable:
        return False
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    return True


_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000


def _enter_namespaces() -> bool:
    """Continue in a child that is the first process of new namespaces; False where the kernel
    refuses them."""
    user, group = os.geteuid(), os.getegid()
    kinds = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    if _libc.unshare(kinds) != 0:
        return False
    _prctl(_PR_SET_DUMPABLE, 1)  # else the files below belong to root
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _prctl(_PR_SET_DUMPABLE, 0)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(min(abs(os.waitstatus_to_exitcode(status)), 255))
    _end_with_parent()
    return _libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) == 0


_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000


def _mount(what: str, where: str, kind: str, options: str) -> bool:
    flags = _MS_NOSUID | _MS_NODEV | (_MS_NOEXEC if kind == "proc" else 0)
    words = (what.encode(), where.encode(), kind.encode(), flags, options.encode())
    return _libc.mount(*words) == 0


def _mount_folder(folder: str) -> bool:
    return _mount(
        "hone", folder, "tmpfs", f"size={MAX_FOLDER_BYTES},nr_inodes={_MAX_FILES},mode=700"
    )


class SharedFolder:
    """A folder in which programs that `enter` it as a shared one find the files of those before
    them. Its methods raise OSError where the kernel refuses what it has allowed before."""

    def __init__(self, walls: Walls) -> None:
        self._walls = walls
        self._place: str | None = None

    def open(self, place: str) -> None:
        """Make the folder, unless that is done."""
        if self._walls.tmpfs and self._place is None:
            if not _mount_folder(place):
                raise OSError(ctypes.get_errno(), "no folder in memory")
            self._place = place

    def remove(self) -> None:
        """Remove its files, once no program is left in it, where it is a folder in memory."""
        if self._place is not None:
            if _libc.umount2(self._place.encode(), 0) != 0:
                raise OSError(ctypes.get_errno(), "the folder in memory cannot be removed")
            self._place = None


_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1


def _make_read_only() -> bool:
    """Make all current mounts read-only; False where the kernel (before 5.12) cannot."""
    attributes = struct.pack("=4Q", _MOUNT_ATTR_RDONLY, 0, 0, 0)  # set, clear, propagation, user
    words = (_AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))
    return _libc.syscall(_MOUNT_SETATTR, *words) == 0


# ---- raised by each program's process ------------------------------------------------------------


def enter(walls: Walls, folder: str, *, is_shared: bool = False) -> None:
    """Put this process behind all walls; it may only write to `folder`, which is its own unless
    `is_shared`.

    Raises OSError where a wall that `raise_walls` has found cannot be raised.
    """
    os.setsid()
    if (
        walls.tmpfs
        and not is_shared
        and not (_libc.unshare(_CLONE_NEWNS) == 0 and _mount_folder(folder))
    ):
        raise OSError(ctypes.get_errno(), "no folder in memory")
    # Unlike the mount itself, a program may remove it.
    work = f"{folder}/{SHARED if is_shared else os.getpid()}"
    os.makedirs(work, exist_ok=is_shared)
    os.chdir(work)
    bounds = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
    ]
    if "forks" not in walls.missing:
        # Only then: otherwise the trainer's processes, of the same user, would count too.
        bounds.append((resource.RLIMIT_NPROC, _MAX_PROCESSES))
    for kind, most in bounds:
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    if sys.platform != "linux":
        return
    _drop_capabilities()
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if walls.landlock:
        _restrict_files(walls.landlock, folder, has_own_proc=walls.own_proc)
    if walls.seccomp:
        may_change = walls.read_only or walls.user
        _filter_calls(_instructions(may_signal=walls.namespaces, may_change=may_change))


_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 24, 36, 38


def _prctl(option: int, value: int, pointer: object = None) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _drop_capabilities() -> None:
    """Give up all capabilities, including those that an executed program could get back."""
    for capability in range(64):
        # It fails without CAP_SETPCAP; then programs get no privileges anyway (NO_NEW_PRIVS).
        _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    if _libc.capset(header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")


# ---- Landlock ------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # alike on all machines
_LANDLOCK_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14  # and to truncate
_FILE_RIGHTS = {1: 1 << 13, 2: 1 << 14, 3: 1 << 15, 4: 1 << 15, 5: 1 << 16}
"""By Landlock version, the bit above the highest file right; later versions have that of 5."""
_NET_SINCE, _SCOPES_SINCE = 4, 6

_READABLE = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sys/devices/system/cpu"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd", "/etc/group"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def _landlock_version() -> int:
    return max(_libc.syscall(_CREATE_RULESET, None, 0, _LANDLOCK_VERSION_FLAG), 0)


def _restrict_files(version: int, folder: str, *, has_own_proc: bool) -> None:
    """Allow reading Python and the system's libraries, and writing to `folder`. Later versions of
    Landlock also forbid TCP, signals and abstract sockets to other processes."""
    rights = _FILE_RIGHTS.get(version, _FILE_RIGHTS[5]) - 1
    fields = [rights]
    if version >= _NET_SINCE:
        fields.append(0b11)
    if version >= _SCOPES_SINCE:
        fields.append(0b11)
    rules = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _libc.syscall(_CREATE_RULESET, rules, len(rules), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "no Landlock ruleset")
    proc = ("/proc",) if has_own_proc else ("/proc/self", "/proc/cpuinfo", "/proc/meminfo")
    allowed = dict.fromkeys((*sys.path, sys.prefix, sys.base_prefix, *_READABLE, *proc), _READ)
    allowed |= dict.fromkeys(_DEVICES, _READ_FILE | _WRITE_FILE) | {folder: rights}
    for place, granted in allowed.items():
        try:
            handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # it does not exist on this machine
        if not os.path.isdir(place):
            granted &= _OF_FILES
        rule = struct.pack("=Qi", granted & rights, handle)
        if _libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0) != 0:
            raise OSError(ctypes.get_errno(), f"no Landlock rule for {place}")
        os.close(handle)
    if _libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self failed")
    os.close(ruleset)


# ---- seccomp -------------------------------------------------------------------------------------

# By name: the numbers on x86-64 and on ARM of 64 bits.
_REFUSED_CALLS = {
    # into other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tkill": (200, 130),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    # out of this process's namespaces, or into new ones with new rights
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    # networks, and sockets of other programs of this host
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    # memory that no limit counts, or that outlives the process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # the same of other processes, whose numbers can be guessed
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    # what other processes do with files, which Landlock does not hide
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    # keys of this user, and what attacks on the kernel begin with
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
_CHANGES = {
    "chmod": (90, 53),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, 54),
    "fchown": (93, 55),
    "lchown": (94, 54),
    "fchownat": (260, 54),
    "utime": (132, 88),
    "utimes": (235, 88),
    "futimesat": (261, 88),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "truncate": (76, 45),
}
"""Calls by which an owner may change any file in spite of Landlock; before its version 3 that
includes truncation. ARM has only the later call of each kind."""
_CLONE, _CLONE3 = (56, 220), (435, 435)
_SOCKETPAIR, _DATAGRAM = (53, 199), 2
"""A datagram socket of a pair can be reconnected, and send to sockets of other programs."""
_KILL, _TGKILL, _PRLIMIT = (62, 129), (234, 131), (302, 261)
_FCNTL, _IOCTL = (72, 25), (16, 29)
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP = 8, 10, 15, 0x8901, 0x8902
"""Commands that make the kernel send any signal to any process."""
_F_SETLEASE, _F_NOTIFY = 1024, 1026
"""Commands that block others who open a file, and report what they do in a folder."""

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the column of its call numbers above, and its audit architecture in the kernel."""
_MACHINE = _MACHINES.get(platform.machine())
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_X32_CALLS = 0x40000000

_Instruction = tuple[int, int, int, int]
"""Code; instructions to skip where the condition holds, and where it does not; operand."""


def _has_seccomp() -> bool:
    with open("/proc/self/status") as file:
        return _MACHINE is not None and "Seccomp:" in file.read()


def _instructions(*, may_signal: bool, may_change: bool) -> list[_Instruction]:
    """The filter that the kernel runs before each system call. With `may_signal` a namespace limits
    signals; otherwise a process may only signal itself. With `may_change` another wall protects
    foreign files; otherwise no permissions and times may be changed at all."""
    assert _MACHINE is not None
    column, name = _MACHINE
    refuse: _Instruction = (_RETURN, 0, 0, _EPERM)
    allow: _Instruction = (_RETURN, 0, 0, _ALLOW)

    def load_argument(index: int) -> _Instruction:
        return (_LOAD, 0, 0, 16 + 8 * index)  # the lower 32 bits

    def of(numbers: tuple[int, int], *block: _Instruction) -> list[_Instruction]:
        return [(_IF_EQUAL, 0, len(block), numbers[column]), *block]

    def unless(condition: int, value: int, end: _Instruction) -> list[_Instruction]:
        return [(condition, 0, 1, value), end]

    filters = [(_LOAD, 0, 0, 4), (_IF_EQUAL, 1, 0, name), refuse, (_LOAD, 0, 0, 0)]
    if column == 0:
        filters += unless(_IF_AT_LEAST, _X32_CALLS, refuse)
    refused = _REFUSED_CALLS if may_change else _REFUSED_CALLS | _CHANGES
    for numbers in refused.values():
        filters += of(numbers, refuse)
    # ENOSYS makes C libraries use clone, whose flags the filter can read.
    filters += of(_CLONE3, (_RETURN, 0, 0, _ENOSYS))
    namespaces = unless(_IF_BITS, _CLONE_NEWUSER, refuse)
    filters += of(_CLONE, load_argument(0), *namespaces, allow)
    filters += of(_PRLIMIT, load_argument(0), *unless(_IF_EQUAL, 0, allow), refuse)
    filters += of(_SOCKETPAIR, load_argument(1), *unless(_IF_BITS, _DATAGRAM, refuse), allow)
    commands = [x for value in (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY)
                for x in unless(_IF_EQUAL, value, refuse)]  # fmt: skip
    filters += of(_FCNTL, load_argument(1), *commands, allow)
    owners = [x for value in (_FIOSETOWN, _SIOCSPGRP) for x in unless(_IF_EQUAL, value, refuse)]
    filters += of(_IOCTL, load_argument(1), *owners, allow)
    if not may_signal:
        itself = unless(_IF_EQUAL, os.getpid(), allow)
        filters += of(_KILL, load_argument(0), *itself, refuse)
        filters += of(_TGKILL, load_argument(0), *itself, refuse)
    return [*filters, allow]


def _filter_calls(instructions: list[_Instruction]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *x) for x in instructions))
    program = ctypes.create_string_buffer(
        struct.pack("@HP", len(instructions), ctypes.addressof(code))
    )
    _prctl(_PR_SET_SECCOMP, 2, program)  # SECCOMP_MODE_FILTER
