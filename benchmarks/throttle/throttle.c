/* Which reads of a file take how long, on a file system with known limits? Preloaded (LD_PRELOAD) into every rank of a job.

Opens and reads below one folder are those of the C library, and return only when the file system with the limits of the table
would have answered. So whatever reads is limited alike: Python, HDF5, zarr-python.

All ranks share one file (SHARDLOAD_THROTTLE) that is mapped by each: the limits, and for each resource the time when it is free
next. A request of n bytes takes n / rate of each resource's time, one after the other, and then the latency. The pages that a
node has read are in its cache. It reads ahead as Linux does: if a read begins where the last one of that descriptor ended, twice
as much as was read in order so far, up to one request's bytes; after any other read, nothing.

The layout of the file is known to `__init__.py` too. Times are seconds of CLOCK_MONOTONIC. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, NODES = 64, FORGOTTEN = 4096, SLOTS = 1 << 20, PROBES = 16, FILES = 1 << 16 };

struct shared {
    /* limits, written by Python between loads */
    double rate, node_rate, stream_rate, operations_rate, open_seconds, read_seconds, request_nbytes, has_cache;
    double network_rate, network_latency, burst_seconds, generation;
    /* counted since Python set them to 0 */
    double nbytes, operations, opens, sent_nbytes;
    /* when each resource is free next */
    double file_system, requests, node[NODES], out_of[NODES], into[NODES];
    atomic_int lock;
    uint32_t forgotten[FORGOTTEN]; /* counted up when a node drops a file from its cache */
    uint64_t cached[SLOTS];        /* 24 bits that say which page, 40 bits when it is there, in microseconds */
};

static struct shared *all;
static const char *folder;
static size_t folder_length;
static int ranks_per_node = 1;
static __thread double stream; /* when this thread's stream is free next */
static struct { dev_t dev; ino_t ino; char is_ours, is_random; uint64_t next, in_order; } files[FILES];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void sleep_until(double when) {
    struct timespec t = {(time_t)when, (long)(1e9 * (when - (time_t)when))};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {}
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SHARDLOAD_THROTTLE"), *per_node = getenv("SHARDLOAD_THROTTLE_RANKS_PER_NODE");
    folder = getenv("SHARDLOAD_THROTTLE_FOLDER");
    if (!path || !folder) return;
    folder_length = strlen(folder);
    if (per_node && atoi(per_node) > 0) ranks_per_node = atoi(per_node);
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int fd = real(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED) all = at;
}

static int node_of(int rank) { return rank / ranks_per_node % NODES; }

static int this_node(void) {
    static const char *names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"};
    static int found = -1;
    for (int k = 0; found < 0 && k < 4; k++)
        if (getenv(names[k])) found = node_of(atoi(getenv(names[k])));
    return found < 0 ? 0 : found;
}

static void take(void) { while (atomic_exchange_explicit(&all->lock, 1, memory_order_acquire)) sched_yield(); }
static void give(void) { atomic_store_explicit(&all->lock, 0, memory_order_release); }

static double most(double a, double b) { return a > b ? a : b; }

/* When a resource has served one more request. It may make up for a burst: sleeps end late on a busy machine. */
static double reserve(double *free_at, double seconds, double at) {
    *free_at = most(*free_at, at - all->burst_seconds) + seconds;
    return most(*free_at, at);
}

/* When the file system takes one more request: at once, if it has taken none for a while. */
static double admit(double at) {
    double seconds = 1 / all->operations_rate;
    all->operations += 1;
    return most(reserve(&all->requests, seconds, at) - seconds, at);
}

/* One request of the file system; the lock is taken. Returns when its last byte has left the slowest resource. */
static double request(double nbytes, int node, double at) {
    double end = most(admit(at), reserve(&all->file_system, nbytes / all->rate, at));
    end = most(end, reserve(&all->node[node], nbytes / all->node_rate, at));
    all->nbytes += nbytes;
    return most(end, reserve(&stream, nbytes / all->stream_rate, at));
}

static uint64_t mixed(uint64_t x) {
    x ^= x >> 33; x *= 0xff51afd7ed558ccdULL; x ^= x >> 33; x *= 0xc4ceb9fe1a85ec53ULL;
    return x ^ x >> 33;
}

/* A page's slot, or where it may be put. */
static uint64_t *slot_of(uint64_t key, uint64_t tag, int *is_there) {
    uint64_t *oldest = NULL;
    for (int k = 0; k < PROBES; k++) {
        uint64_t *slot = &all->cached[(key + k) % SLOTS];
        if ((*is_there = *slot >> 40 == tag)) return slot;
        if (!oldest || (*slot & 0xffffffffffULL) < (*oldest & 0xffffffffffULL)) oldest = slot;
    }
    return oldest;
}

struct file { uint64_t seed; int node; };

static struct file file_of(const struct stat *st) {
    int node = this_node();
    uint64_t name = mixed(st->st_ino * 64 + node) ^ mixed(st->st_dev);
    uint64_t seed = mixed(name + ((uint64_t)all->generation << 40) + all->forgotten[name % FORGOTTEN]);
    return (struct file){seed, node};
}

static uint64_t *page(struct file file, uint64_t number, int *is_there, uint64_t *tag) {
    uint64_t key = mixed(file.seed + number * 0x9e3779b97f4a7c15ULL);
    *tag = key >> 40 | 1;
    return slot_of(key, *tag, is_there);
}

static int is_cached(struct file file, uint64_t number) {
    int is_there; uint64_t tag;
    page(file, number, &is_there, &tag);
    return is_there;
}

/* Fetch pages that are missing from `first` on, up to `last` and one request; the lock is taken. Returns the page after. */
static uint64_t fetch(struct file file, uint64_t first, uint64_t last, double at, double *end) {
    uint64_t stop = first, room = all->request_nbytes / PAGE < 1 ? 1 : (uint64_t)(all->request_nbytes / PAGE);
    while (stop <= last && stop < first + room && !is_cached(file, stop)) stop++;
    *end = request((double)(stop - first) * PAGE, file.node, at);
    for (uint64_t k = first; k < stop; k++) {
        int is_there; uint64_t tag;
        uint64_t *slot = page(file, k, &is_there, &tag);
        *slot = tag << 40 | ((uint64_t)(1e6 * (*end + all->read_seconds)) & 0xffffffffffULL);
    }
    return stop;
}

/* Pages to read ahead after a read of so many. */
static uint64_t to_read_ahead(int fd, uint64_t first, uint64_t last) {
    int is_in_order = !files[fd].is_random && (first == files[fd].next || first + 1 == files[fd].next);
    files[fd].in_order = is_in_order ? files[fd].in_order + last + 1 - first : 0;
    files[fd].next = last + 1;
    uint64_t most_pages = (uint64_t)(all->request_nbytes / PAGE);
    return 2 * files[fd].in_order < most_pages ? 2 * files[fd].in_order : most_pages;
}

static void wait_cached(struct file file, uint64_t first, uint64_t last, uint64_t end_of_file, uint64_t ahead) {
    double ready = 0, end;
    uint64_t k = first;
    take();
    while (k <= last) {
        int is_there; uint64_t tag, *slot = page(file, k, &is_there, &tag);
        if (is_there) {
            ready = most(ready, 1e-6 * (*slot & 0xffffffffffULL));
            k++;
            continue;
        }
        k = fetch(file, k, last, now(), &end);
        ready = most(ready, end + all->read_seconds);
        give();
        sleep_until(end); /* the next request leaves when this one's bytes are through */
        take();
    }
    uint64_t mark = last + 1 + ahead / 2;
    uint64_t to = last + ahead < end_of_file ? last + ahead : end_of_file;
    if (ahead && last < end_of_file && !is_cached(file, mark < end_of_file ? mark : end_of_file)) {
        uint64_t begin = last + 1;
        while (begin <= to && is_cached(file, begin)) begin++;
        if (begin <= to) fetch(file, begin, to, now(), &end);
    }
    give();
    sleep_until(ready);
}

static void wait_uncached(int node, double left) {
    double end = 0;
    while (left > 0) {
        double n = left < all->request_nbytes ? left : all->request_nbytes;
        take();
        end = request(n, node, now());
        give();
        sleep_until(end);
        left -= n;
    }
    sleep_until(end + all->read_seconds);
}

static int is_below(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    return n > (ssize_t)folder_length && !strncmp(path, folder, folder_length) && path[folder_length] == '/';
}

/* True if reads of a descriptor are limited. */
static int is_ours(int fd, struct stat *st) {
    if (!all || fd < 3 || fd >= FILES || fstat(fd, st) || !S_ISREG(st->st_mode)) return 0;
    if (files[fd].ino != st->st_ino || files[fd].dev != st->st_dev) {
        files[fd].is_ours = is_below(fd);
        files[fd].is_random = 0;
        files[fd].next = files[fd].in_order = 0;
        files[fd].dev = st->st_dev;
        files[fd].ino = st->st_ino;
    }
    return files[fd].is_ours;
}

static void before_read(int fd, off_t offset, size_t n) {
    struct stat st;
    if (!is_ours(fd, &st)) return;
    if (offset < 0) offset = lseek(fd, 0, SEEK_CUR);
    if (offset >= st.st_size || !n) return;
    if ((off_t)n > st.st_size - offset) n = st.st_size - offset;
    if (all->has_cache)
    {
        uint64_t first = offset / PAGE, last = (offset + n - 1) / PAGE;
        wait_cached(file_of(&st), first, last, (st.st_size - 1) / PAGE, to_read_ahead(fd, first, last));
    }
    else
        wait_uncached(this_node(), n);
}

static int after_open(int fd) {
    struct stat st;
    int error = errno;
    if (fd >= 3 && fd < FILES) files[fd].ino = 0, files[fd].is_random = 0;
    if (is_ours(fd, &st)) {
        take();
        double end = admit(now());
        all->opens += 1;
        give();
        sleep_until(end + all->open_seconds);
    }
    errno = error;
    return fd;
}

static size_t total(const struct iovec *parts, int n) {
    size_t found = 0;
    for (int k = 0; k < n; k++) found += parts[k].iov_len;
    return found;
}

/* The seconds of CLOCK_MONOTONIC at which a message arrives; for Python. */
double throttle_message(int from, int to, double nbytes) {
    if (!all || node_of(from) == node_of(to)) return 0;
    take();
    double at = now(), seconds = nbytes / all->network_rate;
    double left = reserve(&all->out_of[node_of(from)], seconds, at);
    double there = reserve(&all->into[node_of(to)], seconds, at); /* it comes in while it goes out */
    all->sent_nbytes += nbytes;
    give();
    return most(left, there) + all->network_latency;
}

size_t throttle_nbytes(void) { return sizeof *all; }

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list a; va_start(a, flags); mode = va_arg(a, mode_t); va_end(a); }

int open(const char *path, int flags, ...) { REAL(open); MODE return after_open(real(path, flags, mode)); }
int open64(const char *path, int flags, ...) { REAL(open64); MODE return after_open(real(path, flags, mode)); }
int openat(int at, const char *path, int flags, ...) { REAL(openat); MODE return after_open(real(at, path, flags, mode)); }
int openat64(int at, const char *path, int flags, ...) { REAL(openat64); MODE return after_open(real(at, path, flags, mode)); }
ssize_t read(int fd, void *into, size_t n) { REAL(read); before_read(fd, -1, n); return real(fd, into, n); }
ssize_t readv(int fd, const struct iovec *v, int n) { REAL(readv); before_read(fd, -1, total(v, n)); return real(fd, v, n); }
ssize_t pread(int fd, void *into, size_t n, off_t at) { REAL(pread); before_read(fd, at, n); return real(fd, into, n, at); }
ssize_t pread64(int fd, void *into, size_t n, off64_t at) { REAL(pread64); before_read(fd, at, n); return real(fd, into, n, at); }
ssize_t preadv(int fd, const struct iovec *v, int n, off_t at) {
    REAL(preadv); before_read(fd, at, total(v, n)); return real(fd, v, n, at);
}
ssize_t preadv64(int fd, const struct iovec *v, int n, off64_t at) {
    REAL(preadv64); before_read(fd, at, total(v, n)); return real(fd, v, n, at);
}
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t at, int flags) {
    REAL(preadv2); before_read(fd, at, total(v, n)); return real(fd, v, n, at, flags);
}
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t at, int flags) {
    REAL(preadv64v2); before_read(fd, at, total(v, n)); return real(fd, v, n, at, flags);
}

static void advised(int fd, int advice) {
    struct stat st;
    if (!is_ours(fd, &st)) return;
    if (advice == POSIX_FADV_RANDOM) files[fd].is_random = 1;
    if (advice == POSIX_FADV_DONTNEED) {
        uint64_t name = mixed(st.st_ino * 64 + this_node()) ^ mixed(st.st_dev);
        take();
        all->forgotten[name % FORGOTTEN] += 1;
        give();
    }
}
int posix_fadvise(int fd, off_t at, off_t n, int advice) { REAL(posix_fadvise); advised(fd, advice); return real(fd, at, n, advice); }
int posix_fadvise64(int fd, off64_t at, off64_t n, int advice) {
    REAL(posix_fadvise64); advised(fd, advice); return real(fd, at, n, advice);
}
