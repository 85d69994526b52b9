/* A disk that fails, fills up, is slow or stops, and a clock that jumps: for LD_PRELOAD.

   TIGHTFIT_FAULTS names a file of eight 64-bit numbers (faults.py, `Faults`) that all processes
   share; TIGHTFIT_FAULTS_FOLDER is the folder whose files are concerned. Each operation there that
   changes something has a number, counted over all processes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct faults {
    int64_t operations;    /* so far */
    int64_t first, last;   /* which of them fail; 0: none */
    int64_t error;         /* an errno; -1: the process says so in `stopped` and waits */
    int64_t kinds;         /* bit mask of enum kind; 0: all */
    int64_t delay_us;      /* before each operation */
    int64_t clock_ahead_s; /* of the real-time clock */
    int64_t stopped;       /* process id of who waits, or how many have failed */
};
enum kind { WRITE = 1, SYNC = 2, RENAME = 4, OPEN = 8, MAKE = 16, REMOVE = 32 };

static struct faults *faults;
static char folder[PATH_MAX];
static size_t folder_length;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("TIGHTFIT_FAULTS"), *named = getenv("TIGHTFIT_FAULTS_FOLDER");
    if (!path || !named || !realpath(named, folder)) return;
    folder_length = strlen(folder);
    int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void *shared = mmap(NULL, sizeof *faults, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (shared != MAP_FAILED) faults = shared;
}

static int is_inside(const char *path) {
    return !strncmp(path, folder, folder_length)
        && (path[folder_length] == '/' || path[folder_length] == 0);
}

/* Nonzero: the operation fails with errno set. */
static int fails(enum kind kind) {
    struct faults *now = faults;
    if (now->kinds && !(now->kinds & kind)) return 0;
    if (now->delay_us) {
        struct timespec pause = {now->delay_us / 1000000, now->delay_us % 1000000 * 1000};
        syscall(SYS_nanosleep, &pause, NULL);
    }
    int64_t number = __atomic_add_fetch(&now->operations, 1, __ATOMIC_SEQ_CST);
    if (!now->first || number < now->first || number > now->last) return 0;
    if (now->error < 0) {
        now->stopped = getpid();
        struct timespec pause = {600, 0};
        syscall(SYS_nanosleep, &pause, NULL);
        return 0;
    }
    __atomic_add_fetch(&now->stopped, 1, __ATOMIC_SEQ_CST);
    errno = (int)now->error;
    return 1;
}

static int path_fails(int at, const char *path, enum kind kind) {
    if (!faults || !path) return 0;
    int before = errno;
    char whole[2 * PATH_MAX + 2], base[PATH_MAX] = "";
    if (path[0] == '/') {
        snprintf(whole, sizeof whole, "%s", path);
    } else {
        if (at == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 1);
            base[size > 0 ? size : 0] = 0;
        }
        snprintf(whole, sizeof whole, "%s/%s", base, path);
    }
    errno = before;
    return is_inside(whole) && fails(kind);
}

static int file_fails(int file, enum kind kind) {
    if (!faults || file < 3) return 0;
    int before = errno;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    errno = before;
    if (size <= 0) return 0;
    path[size] = 0;
    return is_inside(path) && fails(kind);
}

#define ON_FILE(type, name, kind, parameters, ...) \
    type name parameters { REAL(name); return file_fails(file, kind) ? -1 : real(__VA_ARGS__); }
#define ON_PATH(name, kind, at, parameters, ...) \
    int name parameters { REAL(name); return path_fails(at, path, kind) ? -1 : real(__VA_ARGS__); }

ON_FILE(ssize_t, write, WRITE, (int file, const void *data, size_t size), file, data, size)
ON_FILE(ssize_t, pwrite, WRITE, (int file, const void *data, size_t size, off_t at), file, data, size, at)
ON_FILE(ssize_t, pwrite64, WRITE, (int file, const void *data, size_t size, off64_t at), file, data, size, at)
ON_FILE(ssize_t, writev, WRITE, (int file, const struct iovec *parts, int count), file, parts, count)
ON_FILE(int, fsync, SYNC, (int file), file)
ON_FILE(int, fdatasync, SYNC, (int file), file)
ON_FILE(int, ftruncate, WRITE, (int file, off_t size), file, size)
ON_FILE(int, ftruncate64, WRITE, (int file, off64_t size), file, size)
ON_PATH(rename, RENAME, AT_FDCWD, (const char *path, const char *to), path, to)
ON_PATH(renameat, RENAME, at, (int at, const char *path, int to_at, const char *to), at, path, to_at, to)
ON_PATH(mkdir, MAKE, AT_FDCWD, (const char *path, mode_t mode), path, mode)
ON_PATH(unlink, REMOVE, AT_FDCWD, (const char *path), path)
ON_PATH(unlinkat, REMOVE, at, (int at, const char *path, int flags), at, path, flags)
ON_PATH(rmdir, REMOVE, AT_FDCWD, (const char *path), path)

ssize_t sendfile(int file, int from, off_t *at, size_t size) {
    REAL(sendfile);
    return file_fails(file, WRITE) ? -1 : real(file, from, at, size);
}
ssize_t sendfile64(int file, int from, off64_t *at, size_t size) {
    REAL(sendfile64);
    return file_fails(file, WRITE) ? -1 : real(file, from, at, size);
}
ssize_t copy_file_range(int from, off64_t *from_at, int file, off64_t *at, size_t size, unsigned flags) {
    REAL(copy_file_range);
    return file_fails(file, WRITE) ? -1 : real(from, from_at, file, at, size, flags);
}
int link(const char *from, const char *path) {
    REAL(link);
    return path_fails(AT_FDCWD, path, MAKE) ? -1 : real(from, path);
}

#define OPEN_FUNCTION(name, at, first_parameters, ...) \
    int name(first_parameters const char *path, int flags, ...) { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list more; \
            va_start(more, flags); \
            mode = va_arg(more, mode_t); \
            va_end(more); \
        } \
        if ((flags & O_CREAT) && path_fails(at, path, OPEN)) return -1; \
        return real(__VA_ARGS__, flags, mode); \
    }
#define NOTHING
#define PARENT int at,
OPEN_FUNCTION(open, AT_FDCWD, NOTHING, path)
OPEN_FUNCTION(open64, AT_FDCWD, NOTHING, path)
OPEN_FUNCTION(openat, at, PARENT, at, path)
OPEN_FUNCTION(openat64, at, PARENT, at, path)

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int code = real(clock, now);
    if (!code && faults && clock == CLOCK_REALTIME) now->tv_sec += faults->clock_ahead_s;
    return code;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
