// A stand-in for libnccl.so.2: collectives of processes of one machine through a file in shared memory, which the
// processes of a communicator map. A call has done its work when it returns, so no stream has anything to wait for.
//
// The file has a slot for each rank, through which collectives go piece by piece, and a box for each pair of ranks, for
// messages from one to another. The file is removed when all have mapped it. Each wait ends with an error after
// VCPO_FAKE_NCCL_TIMEOUT_S seconds (300). Build adds the functions of NCCL that torch names and this file does not have:
// those return an error.
#define _GNU_SOURCE
#include <fcntl.h>
#include <nccl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 4 << 20, MOST_RANKS = 16, MOST_MESSAGES = 1024, SPINS = 200 };

struct shared {
  _Atomic int arrived, round;
  _Atomic int full[MOST_RANKS][MOST_RANKS];  // whether the box from one rank to another has a piece
};

struct ncclComm {
  int rank, size;
  _Atomic int aborted;
  struct shared *shared;
  char *slots, *boxes;
};

// ---- waiting

static __thread char why[160] = "fake NCCL: no error";

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + time.tv_nsec * 1e-9;
}

struct wait {
  long turns;
  double deadline;
};

// One turn of a wait for other ranks; false where there is no more waiting.
static int patient(struct wait *wait, ncclComm_t comm, const char *what) {
  if (comm->aborted) return snprintf(why, sizeof why, "fake NCCL: %s: aborted", what), 0;
  if (++wait->turns < SPINS) return 1;
  if (wait->turns == SPINS) {
    const char *limit = getenv("VCPO_FAKE_NCCL_TIMEOUT_S");
    wait->deadline = now() + (limit ? atof(limit) : 300);
  } else if (now() > wait->deadline) {
    return snprintf(why, sizeof why, "fake NCCL: %s: rank %d of %d waited too long", what, comm->rank, comm->size), 0;
  }
  struct timespec nap = {0, 20000};
  nanosleep(&nap, NULL);
  return 1;
}

static ncclResult_t barrier(ncclComm_t comm) {
  struct shared *shared = comm->shared;
  int round = shared->round;
  if (atomic_fetch_add(&shared->arrived, 1) == comm->size - 1) {
    shared->arrived = 0;
    atomic_fetch_add(&shared->round, 1);
    return ncclSuccess;
  }
  for (struct wait wait = {0}; shared->round == round;)
    if (!patient(&wait, comm, "a collective")) return ncclSystemError;
  return ncclSuccess;
}

// ---- communicators

ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t result) { return result ? why : "no error"; }
const char *ncclGetLastError(ncclComm_t comm) { return why; }

// The name of the file: VCPO_TEST_SESSION, by which its leavings are found, and random digits.
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  unsigned long long digits[2];
  const char *session = getenv("VCPO_TEST_SESSION");
  if (getrandom(digits, sizeof digits, 0) != sizeof digits) return ncclSystemError;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/dev/shm/vcpo-fake-nccl-%.40s-%016llx%016llx", session ? session : "none",
           digits[0], digits[1]);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *made, int size, ncclUniqueId id, int rank) {
  if (size > MOST_RANKS) return ncclInvalidArgument;
  size_t slots = (size_t)PIECE * size, boxes = (size_t)PIECE * size * size;
  size_t bytes = sizeof(struct shared) + slots + boxes;  // a page takes memory when it is written first
  int file = open(id.internal, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, (off_t)bytes)) return ncclSystemError;
  char *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (start == MAP_FAILED) return ncclSystemError;
  ncclComm_t comm = calloc(1, sizeof *comm);
  comm->rank = rank;
  comm->size = size;
  comm->shared = (struct shared *)start;
  comm->slots = start + sizeof(struct shared);
  comm->boxes = comm->slots + slots;
  *made = comm;
  ncclResult_t result = barrier(comm);
  if (rank == 0) unlink(id.internal);
  return result;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return ncclCommInitRank(made, size, id, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *made, int size, int rank, int ids, ncclUniqueId *id,
                                      ncclConfig_t *config) {
  return ncclCommInitRank(made, size, *id, rank);
}

// The mapping stays until the process ends: another thread may be in a call.
ncclResult_t ncclCommAbort(ncclComm_t comm) { comm->aborted = 1; return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclSuccess; }
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int *size) { *size = comm->size; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { *rank = comm->rank; return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) { *error = ncclSuccess; return ncclSuccess; }

// ---- reductions: in the order of the ranks, of bfloat16 in float32 with one rounding

static const size_t SIZE_OF[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

static float of_bfloat16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static uint16_t to_bfloat16(float value) {  // to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define REDUCE(type, wide, load, store)                                                        \
  for (size_t i = 0; i < count; i++) {                                                         \
    wide sum = load(((type *)comm->slots)[first + i]);                                         \
    for (int rank = 1; rank < comm->size; rank++) {                                            \
      wide next = load(((type *)(comm->slots + (size_t)PIECE * rank))[first + i]);             \
      if (op == ncclSum || op == ncclAvg) sum += next;                                         \
      if (op == ncclProd) sum *= next;                                                         \
      if (op == ncclMax && (next > sum || next != next)) sum = next;                           \
      if (op == ncclMin && (next < sum || next != next)) sum = next;                           \
    }                                                                                          \
    ((type *)out)[i] = store(op == ncclAvg ? sum / comm->size : sum);                          \
  }                                                                                            \
  return ncclSuccess

// `count` numbers, from number `first` of each rank's slot on, into `out`.
static ncclResult_t reduce(ncclComm_t comm, void *out, size_t first, size_t count, ncclDataType_t type, int op) {
  if (op > ncclAvg) return ncclInvalidArgument;
  switch (type) {
    case ncclInt8: REDUCE(int8_t, int8_t, , );
    case ncclUint8: REDUCE(uint8_t, uint8_t, , );
    case ncclInt32: REDUCE(int32_t, int32_t, , );
    case ncclUint32: REDUCE(uint32_t, uint32_t, , );
    case ncclInt64: REDUCE(int64_t, int64_t, , );
    case ncclUint64: REDUCE(uint64_t, uint64_t, , );
    case ncclFloat32: REDUCE(float, float, , );
    case ncclFloat64: REDUCE(double, double, , );
    case ncclBfloat16: REDUCE(uint16_t, float, of_bfloat16, to_bfloat16);
    default: return snprintf(why, sizeof why, "fake NCCL: no reduction of type %d", type), ncclInvalidArgument;
  }
}

// ---- collectives: every rank fills its slot with a piece, all wait, every rank takes what it needs, all wait

#define TRY(call)                          \
  do {                                     \
    ncclResult_t result = (call);          \
    if (result) return result;             \
  } while (0)

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static char *slot(ncclComm_t comm, int rank) { return comm->slots + (size_t)PIECE * rank; }

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  size_t width = SIZE_OF[type], most = PIECE / width;
  for (size_t at = 0; at < count; at += most) {
    size_t part = smaller(count - at, most);
    memcpy(slot(comm, comm->rank), (char *)from + at * width, part * width);
    TRY(barrier(comm));
    TRY(reduce(comm, (char *)to + at * width, 0, part, type, op));
    TRY(barrier(comm));
  }
  return ncclSuccess;
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  void *all = comm->rank == root ? to : malloc(count * SIZE_OF[type] + 1);
  ncclResult_t result = ncclAllReduce(from, all, count, type, op, comm, stream);
  if (all != to) free(all);
  return result;
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  size_t width = SIZE_OF[type];
  char *all = malloc(count * width * comm->size + 1);
  ncclResult_t result = ncclAllReduce(from, all, count * comm->size, type, op, comm, stream);
  memcpy(to, all + count * width * comm->rank, count * width);
  free(all);
  return result;
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t bytes = count * SIZE_OF[type];
  for (size_t at = 0; at < bytes; at += PIECE) {
    size_t part = smaller(bytes - at, PIECE);
    if (comm->rank == root) memcpy(slot(comm, root), (char *)from + at, part);
    TRY(barrier(comm));
    memcpy((char *)to + at, slot(comm, root), part);
    TRY(barrier(comm));
  }
  return ncclSuccess;
}

ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t bytes = count * SIZE_OF[type];
  for (size_t at = 0; at < bytes; at += PIECE) {
    size_t part = smaller(bytes - at, PIECE);
    memcpy(slot(comm, comm->rank), (char *)from + at, part);
    TRY(barrier(comm));
    for (int rank = 0; rank < comm->size; rank++) memcpy((char *)to + rank * bytes + at, slot(comm, rank), part);
    TRY(barrier(comm));
  }
  return ncclSuccess;
}

// ---- messages: those of a group go on beside each other, piece by piece, until all are done

struct message {
  int receives, peer, done;
  char *data;
  size_t bytes, at;
  ncclComm_t comm;
};
static __thread struct message group[MOST_MESSAGES];
static __thread int messages, depth;

// Moves a piece of the message, if its box allows; whether it did.
static int moved(struct message *of) {
  ncclComm_t comm = of->comm;
  int from = of->receives ? of->peer : comm->rank, to = of->receives ? comm->rank : of->peer;
  _Atomic int *full = &comm->shared->full[from][to];
  if (*full != of->receives) return 0;
  char *box = comm->boxes + (size_t)PIECE * (from * comm->size + to), *here = of->data + of->at;
  size_t part = smaller(of->bytes - of->at, PIECE);
  memcpy(of->receives ? here : box, of->receives ? box : here, part);
  *full = !of->receives;
  of->at += part;
  of->done = of->at == of->bytes;
  return 1;
}

// Whether an earlier message of the group, which goes the same way, is not done: messages arrive in their order.
static int waits_its_turn(int which) {
  for (int i = 0; i < which; i++)
    if (!group[i].done && group[i].comm == group[which].comm && group[i].peer == group[which].peer &&
        group[i].receives == group[which].receives)
      return 1;
  return 0;
}

static ncclResult_t deliver(void) {
  struct wait wait = {0};
  for (int left = messages; left;) {
    int progress = 0;
    left = 0;
    for (int i = 0; i < messages; i++) {
      if (!group[i].done && !waits_its_turn(i)) progress |= moved(&group[i]);
      left += !group[i].done;
    }
    if (progress) wait.turns = 0;
    else if (left && !patient(&wait, group[0].comm, "a message")) break;
    if (!left) return messages = 0, ncclSuccess;
  }
  return messages = 0, ncclSystemError;
}

ncclResult_t ncclGroupStart(void) { depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { return --depth || !messages ? ncclSuccess : deliver(); }

static ncclResult_t post(int receives, void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm) {
  if (messages == MOST_MESSAGES) return ncclInvalidUsage;
  group[messages++] = (struct message){receives, peer, 0, data, count * SIZE_OF[type], 0, comm};
  return depth ? ncclSuccess : deliver();
}

ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return post(0, (void *)data, count, type, peer, comm);
}

ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return post(1, data, count, type, peer, comm);
}
