/* A disk and a clock that the test controls, loaded before the C library with LD_PRELOAD.
 *
 * `struct orders` is in a file that the test and the broker map: a change applies from the next
 * call on. In the broker only the embedded store makes these calls on files: sockets and logs use
 * others. The order of the fields is that of ORDERS in shim.py.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct orders {
    int64_t sync_delay;   /* additional microseconds of a sync */
    int64_t write_delay;  /* and of a write */
    int64_t room;         /* bytes that can still be written; below 0: no limit */
    int64_t write_errno;  /* error of every write; 0: none */
    int64_t sync_errno;
    int64_t read_errno;
    int64_t good_reads;   /* reads that succeed before the first failure */
    int64_t create_errno; /* of creating a file, or opening one for writing */
    int64_t wall_offset;  /* seconds by which the wall clock is wrong */
    int64_t failures;     /* set by this library: calls that failed on request */
};

static struct orders idle = {.room = -1};
static struct orders *orders = &idle;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SHIM_ORDERS");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *place = mmap(NULL, sizeof(struct orders), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (place != MAP_FAILED)
        orders = place;
}

/* The original function of that name. */
#define REAL(name)                                      \
    ({                                                  \
        static __typeof__(&name) found;                 \
        if (!found)                                     \
            found = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
        found;                                          \
    })

static void wait_for(int64_t microseconds) {
    if (microseconds > 0) {
        struct timespec span = {microseconds / 1000000, microseconds % 1000000 * 1000};
        nanosleep(&span, NULL);
    }
}

static int fails(int64_t with) {
    if (!with)
        return 0;
    __atomic_add_fetch(&orders->failures, 1, __ATOMIC_RELAXED);
    errno = (int)with;
    return 1;
}

/* Return how many of `wanted` bytes fit; -1 with errno set if none do. */
static int64_t take_room(int64_t wanted) {
    int64_t room = __atomic_load_n(&orders->room, __ATOMIC_RELAXED);
    if (room < 0)
        return wanted;
    if (room == 0) {
        fails(ENOSPC);
        return -1;
    }
    int64_t taken = room < wanted ? room : wanted;
    __atomic_sub_fetch(&orders->room, taken, __ATOMIC_RELAXED);
    return taken;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    wait_for(orders->write_delay);
    if (fails(orders->write_errno))
        return -1;
    int64_t taken = take_room((int64_t)size);
    return taken < 0 ? -1 : REAL(pwrite64)(fd, data, (size_t)taken, at);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
    wait_for(orders->write_delay);
    if (flags & RWF_DSYNC) {
        wait_for(orders->sync_delay);
        if (fails(orders->sync_errno))
            return -1;
    }
    if (fails(orders->write_errno))
        return -1;
    int64_t size = 0;
    for (int nth = 0; nth < count; nth++)
        size += (int64_t)parts[nth].iov_len;
    int64_t taken = take_room(size);
    if (taken < 0)
        return -1;
    if (taken == size)
        return REAL(pwritev64v2)(fd, parts, count, at, flags);
    size_t first = parts[0].iov_len < (size_t)taken ? parts[0].iov_len : (size_t)taken;
    return REAL(pwrite64)(fd, parts[0].iov_base, first, at); /* a short write, as on a full disk */
}

int fdatasync(int fd) {
    wait_for(orders->sync_delay);
    return fails(orders->sync_errno) ? -1 : REAL(fdatasync)(fd);
}

int fsync(int fd) {
    wait_for(orders->sync_delay);
    return fails(orders->sync_errno) ? -1 : REAL(fsync)(fd);
}

ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    if (orders->read_errno && __atomic_sub_fetch(&orders->good_reads, 1, __ATOMIC_RELAXED) < 0) {
        fails(orders->read_errno);
        return -1;
    }
    return REAL(pread64)(fd, data, size, at);
}

int open64(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
    }
    if ((flags & O_ACCMODE) != O_RDONLY && fails(orders->create_errno))
        return -1;
    return REAL(open64)(path, flags, mode);
}

int statvfs64(const char *path, struct statvfs64 *found) {
    int answer = REAL(statvfs64)(path, found);
    if (answer == 0 && orders->room >= 0)
        found->f_bavail = (fsblkcnt64_t)orders->room / found->f_frsize;
    return answer;
}

int clock_gettime(clockid_t which, struct timespec *now) {
    int answer = REAL(clock_gettime)(which, now);
    if (answer == 0 && which == CLOCK_REALTIME)
        now->tv_sec += orders->wall_offset;
    return answer;
}

int gettimeofday(struct timeval *now, void *zone) {
    int answer = REAL(gettimeofday)(now, zone);
    if (answer == 0)
        now->tv_sec += orders->wall_offset;
    return answer;
}

time_t time(time_t *out) {
    struct timeval now;
    gettimeofday(&now, NULL);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}
