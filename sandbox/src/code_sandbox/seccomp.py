"""A seccomp filter that allows the system calls of numerical Python, and no others.

Namespaces hide from a program what is not its own; the filter forbids the calls themselves, so that flaws of the kernel
in other calls are out of reach. strace recorded the list from the programs of `tests/kit/ordinary_programs.py`; it has
the older and newer forms of the recorded calls. libseccomp writes the filter.
"""

import errno
import socket
import tempfile

_FILES = """
access chdir chmod chown close close_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate fchdir fchmod
fchmodat fchmodat2 fchown fchownat fdatasync fgetxattr flistxattr flock fstat fstatfs fsync ftruncate getcwd getdents
getdents64 getxattr lchown lgetxattr link linkat listxattr llistxattr lseek lstat mkdir mkdirat newfstatat open openat
openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readlink readlinkat readv rename renameat renameat2 rmdir
sendfile copy_file_range stat statfs statx symlink symlinkat truncate umask unlink unlinkat utime utimensat utimes write
writev
"""
_MEMORY = "brk get_mempolicy madvise mbind membarrier mincore mmap mprotect mremap msync munmap"
# Not setsid: a session is a group for the scheduler, and a new one has an ordinary priority.
_PROCESSES = """
arch_prctl execve exit exit_group fork vfork wait4 waitid kill tgkill tkill getpid getppid gettid getpgid getpgrp getsid
setpgid getuid geteuid getgid getegid getresuid getresgid getgroups getpriority setpriority getrlimit setrlimit
prlimit64 getrusage times uname sysinfo getcpu getrandom futex futex_waitv set_robust_list get_robust_list rseq
set_tid_address sched_getaffinity sched_get_priority_max sched_get_priority_min sched_getparam sched_getscheduler
sched_yield restart_syscall
"""
_SIGNALS_AND_TIME = """
rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait sigaltstack pause
alarm getitimer setitimer clock_getres clock_gettime clock_nanosleep nanosleep gettimeofday time
"""
# Not sendmsg: a message takes open descriptors along, and what they hold is memory that no limit counts.
_WAITING = """
poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2
pipe pipe2 accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom sendto setsockopt shutdown
"""
ALLOWED = frozenset(f"{_FILES} {_MEMORY} {_PROCESSES} {_SIGNALS_AND_TIME} {_WAITING}".split())
"""The calls that are allowed whatever their arguments. A call that this architecture lacks stays unknown."""

# linux/fcntl.h: duplicates, flags, locks. Not F_SETPIPE_SZ (a user's pipes share 64 MiB), leases, notifications, seals.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
# asm-generic/ioctls.h: TCGETS, TIOCGWINSZ (is it a terminal?), FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# linux/prctl.h: PR_SET_NAME, PR_GET_NAME. Not PR_SET_PDEATHSIG, by which processes end with bubblewrap.
_PRCTL = (15, 16)
# A flag of clone: CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | NEWTIME
_NEW_NAMESPACE = 0x7E020080


def filter_program() -> bytes:
    """Return the filter as struct sock_filter[], for `bwrap --seccomp`.

    A forbidden call fails as on a kernel without the call (ENOSYS): libraries are prepared for that. A call of another
    architecture (32-bit, x32) ends the process.

    Raises:
        OSError: libseccomp is not installed here.
    """
    try:
        import pyseccomp as library
    except RuntimeError as error:
        raise OSError(f"{error}: install it: apt-get install libseccomp2") from None

    rules = library.SyscallFilter(library.ERRNO(errno.ENOSYS))
    rules.set_attr(library.Attr.ACT_BADARCH, library.KILL_PROCESS)
    for name in sorted(ALLOWED):
        rules.add_rule(library.ALLOW, name)
    for name, argument, values in (("fcntl", 1, _FCNTL), ("ioctl", 1, _IOCTL), ("prctl", 0, _PRCTL)):
        for value in values:
            rules.add_rule(library.ALLOW, name, library.Arg(argument, library.MASKED_EQ, 0xFFFFFFFF, value))
    for name in ("socket", "socketpair"):
        rules.add_rule(library.ALLOW, name, library.Arg(0, library.EQ, socket.AF_UNIX))
        rules.add_rule(library.ERRNO(errno.EAFNOSUPPORT), name, library.Arg(0, library.NE, socket.AF_UNIX))
    # clone3's flags lie in memory, where a filter cannot look: without it libc uses clone.
    rules.add_rule(library.ALLOW, "clone", library.Arg(0, library.MASKED_EQ, _NEW_NAMESPACE, 0))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
