"""Ordinary programs of the kind that models write, from which the sandbox's allowed system calls were recorded.

Each program prints "done" last, both as an ordinary process and in the sandbox.
"""

PROGRAMS: dict[str, str] = {
    "numpy": """
import numpy as np
a = np.random.default_rng(0).normal(size=(300, 300))
print(np.linalg.det(a), np.linalg.eigvals(a)[0], np.linalg.svd(a)[1][0], (a @ a).sum(), np.fft.fft(a)[0, 0])
np.save("a.npy", a); np.savetxt("a.txt", a[:3]); np.savez_compressed("a.npz", a=a)
print(np.load("a.npy", mmap_mode="r")[0, 0], np.loadtxt("a.txt").shape, np.load("a.npz")["a"].shape)
print(np.sort(np.random.rand(1_000_000))[0] >= 0, np.convolve([1, 2], [3, 4]), np.roots([1, -3, 2]))
""",
    "scipy": """
import numpy as np
from scipy import fft, integrate, interpolate, linalg, ndimage, optimize, signal, sparse, spatial, special, stats
print(optimize.brentq(lambda x: x * x - 2, 0, 2), optimize.minimize(lambda x: (x - 3) @ (x - 3), np.zeros(2)).x)
print(integrate.quad(np.sin, 0, np.pi)[0], integrate.solve_ivp(lambda t, y: -y, (0, 1), [1.0]).y[0, -1])
print(optimize.linprog([1, 2], A_ub=[[-1, -1]], b_ub=[-1]).fun, optimize.differential_evolution(sum, [(0, 1)]).fun)
print(stats.norm.cdf(1.96), special.gamma(5.5), linalg.expm(np.eye(2))[0, 0], fft.fft([1.0, 2.0], workers=2))
print(sparse.linalg.spsolve(sparse.eye(3).tocsc(), np.ones(3)), spatial.ConvexHull(np.random.rand(9, 2)).area)
print(interpolate.CubicSpline([0, 1, 2], [0, 1, 4])(1.5), signal.find_peaks([0, 1, 0])[0], ndimage.label([1, 0, 1])[1])
""",
    "sympy": """
from sympy import *
x, y = symbols("x y")
n = symbols("n", integer=True, positive=True)
print(integrate(sin(x) ** 2, (x, 0, pi)), solve(x**3 - 6 * x**2 + 11 * x - 6), factorint(2**67 - 1), simplify(x / x))
print(limit(sin(x) / x, x, 0), diff(exp(x * y), x), summation(1 / n**2, (n, 1, oo)), Matrix([[1, 2], [3, 4]]).inv())
print(dsolve(Function("f")(x).diff(x) - Function("f")(x)), series(cos(x), x, 0, 6), nsolve(cos(x) - x, x, 1))
print(lambdify(x, x**2)(3), latex(x**2 / y), N(pi, 50), parse_expr("2*x + 1"), isprime(10**18 + 9), Rational(1, 3))
print(linsolve([x + y - 2, x - y], x, y), groebner([x**2 - 1, x * y - 1], x, y), diophantine(3 * x - 5 * y - 1))
""",
    "files": """
import csv, gzip, json, lzma, os, pathlib, pickle, shutil, sqlite3, tempfile, zipfile
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "a.json").write_text(json.dumps({"a": [1, 2]})); os.chmod(folder / "a.json", 0o600)
with gzip.open(folder / "a.gz", "wt") as f: f.write("x" * 1000)
with lzma.open(folder / "a.xz", "wt") as f: f.write("x" * 1000)
with zipfile.ZipFile(folder / "a.zip", "w") as z: z.write(folder / "a.json", "a.json")
with open(folder / "a.csv", "w", newline="") as f: csv.writer(f).writerows([[1, 2], [3, 4]])
with open(folder / "a.pkl", "wb+") as f:
    pickle.dump({"x": 1}, f); f.flush(); os.fsync(f.fileno()); f.seek(0); print(pickle.load(f)); f.truncate(0)
base = sqlite3.connect(folder / "a.db"); base.execute("create table t (x)"); base.execute("insert into t values (1)")
base.commit(); print(base.execute("select sum(x) from t").fetchone()); base.close()
shutil.copytree(folder, str(folder) + "2"); os.rename(folder / "a.gz", folder / "b.gz"); os.link(folder / "b.gz", "l")
os.symlink("b.gz", folder / "s"); print(os.readlink(folder / "s"), sorted(p.name for p in folder.rglob("*")))
os.utime(folder / "b.gz"); os.access(folder, os.W_OK); os.statvfs(folder); os.scandir(folder).close()
shutil.move(str(folder / "b.gz"), "/tmp/c.gz"); shutil.rmtree(folder); os.makedirs("d/e"); os.removedirs("d/e")
with tempfile.TemporaryFile() as f, tempfile.NamedTemporaryFile() as g: f.write(b"x"); g.write(b"y")
os.chdir("/tmp"); print(os.getcwd(), shutil.disk_usage("/tmp").total > 0, os.umask(0o22))
""",
    "processes": """
import concurrent.futures, multiprocessing, os, signal, subprocess, sys
from multiprocessing import Manager, Pipe, Pool, Process, Queue, shared_memory
with Pool(2) as pool: print(pool.map(abs, [-1, -2]))
with concurrent.futures.ProcessPoolExecutor(2) as pool: print(list(pool.map(abs, [-3, -4])))
queue = Queue(); child = Process(target=queue.put, args=(5,)); child.start(); print(queue.get()); child.join()
left, right = Pipe(); left.send("x"); print(right.recv())
block = shared_memory.SharedMemory(create=True, size=100); block.buf[0] = 1; block.close(); block.unlink()
print(subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True, timeout=30).stdout)
pid = os.fork()
if pid == 0: os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), os.getpid() > 0, os.getppid() > 0, os.cpu_count() > 0)
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
child.terminate(); print(child.wait())
read, write = os.pipe(); os.set_blocking(read, False); os.write(write, b"x"); print(os.read(read, 1))
os.dup2(write, read)
""",
    "spawned processes": """
import multiprocessing
def square(x): return x * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(square, [3]))
""",
    "threads and time": """
import asyncio, concurrent.futures, datetime, queue, selectors, signal, threading, time, zoneinfo
with concurrent.futures.ThreadPoolExecutor(8) as pool: print(sum(pool.map(abs, range(100))))
lock, event, q = threading.Lock(), threading.Event(), queue.Queue()
threads = [threading.Thread(target=q.put, args=(i,)) for i in range(10)]
for thread in threads: thread.start()
for thread in threads: thread.join()
threading.Timer(0.01, event.set).start(); event.wait(5); time.sleep(0.01); print(q.qsize(), time.perf_counter() > 0)
async def main():
    process = await asyncio.create_subprocess_exec("/nowhere") if False else None
    await asyncio.gather(asyncio.sleep(0.01), asyncio.to_thread(time.sleep, 0.01))
    return process
asyncio.run(main()); print(datetime.datetime.now(zoneinfo.ZoneInfo("Europe/Berlin")).year > 2000)
def ring(*_): raise TimeoutError
signal.signal(signal.SIGALRM, ring); signal.setitimer(signal.ITIMER_REAL, 0.05)
try: time.sleep(5)
except TimeoutError: print("rang")
signal.alarm(1); signal.alarm(0); print(time.process_time() >= 0, time.thread_time() >= 0)
s = selectors.DefaultSelector(); s.close(); s = selectors.PollSelector(); s.close(); selectors.SelectSelector().close()
""",
    "the interpreter itself": """
import array, collections, ctypes, dataclasses, faulthandler, gc, hashlib, heapq, inspect, io, locale, mmap, os
import platform
import re, resource, secrets, string, struct, sys, textwrap, traceback, tracemalloc, types, typing, uuid, warnings
import threading, unittest
tracemalloc.start(); faulthandler.enable(); gc.collect(); sys.setrecursionlimit(5000)
print(hashlib.sha256(b"x").hexdigest(), secrets.token_hex(4), uuid.uuid4(), platform.platform(), platform.machine())
m = mmap.mmap(-1, 1 << 20); m[0] = 1; m.close(); libc = ctypes.CDLL(None); print(libc.abs(-3), ctypes.CDLL("libm.so.6"))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0, resource.getrlimit(resource.RLIMIT_NOFILE), os.getloadavg)
resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK)); print(os.sched_getaffinity(0))
def f(n): return 0 if n == 0 else 1 + f(n - 1)
thread = threading.Thread(target=print, args=(f(2000),)); threading.stack_size(64 << 20); thread.start(); thread.join()
x = [bytearray(1 << 20) for _ in range(50)]; del x; print(os.urandom(4), locale.getlocale(), sys.getsizeof([]))
try: f(10**6)
except RecursionError: print("too deep")
print(eval("1 + 1"), compile("1", "", "eval"), inspect.signature(f), traceback.format_stack()[-1], os.get_terminal_size)
print(os.times().user >= 0, os.nice(0), os.getpriority(os.PRIO_PROCESS, 0), os.uname().sysname)
print(os.getuid(), os.getgroups())
""",
    "what is not there": """
import os, socket, subprocess, urllib.request
for attempt in (
    lambda: socket.create_connection(("127.0.0.1", 9), 1),
    lambda: urllib.request.urlopen("http://example.com", timeout=1),
    lambda: subprocess.run(["ls"]), lambda: os.system("ls"), lambda: open("/etc/passwd"), lambda: os.listdir("/proc"),
    lambda: os.path.expanduser("~nobody"), lambda: socket.gethostbyname("example.com"),
):
    try: attempt()
    except OSError as error: print(type(error).__name__)
left, right = socket.socketpair(); left.send(b"x"); print(right.recv(1)); left.close(); right.close()
""",
}
"""The programs, by name."""
PROGRAMS = {name: code.lstrip("\n") + 'print("done")\n' for name, code in PROGRAMS.items()}
