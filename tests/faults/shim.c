/* Fails one system call of this process, or counts them: loaded with LD_PRELOAD, set off by `fault_arm`.

   Only calls on files below one directory count, and readings of the clock for the kind "clock". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { ONCE, LASTING };

static char directory[PATH_MAX];
static char calls[512]; /* ",write,open," */
static int kind_errno;  /* 0 counts only, -1 is a short write or read, -2 a jump of the clock */
static int how;
static long wanted;
static long jump_s;
static int log_fd = -1;
static atomic_long seen;
static atomic_int armed;
static __thread int inside;

void fault_arm(const char *below, const char *which, int error, long at, int lasting, long seconds, int log) {
    strncpy(directory, below, sizeof directory - 1);
    snprintf(calls, sizeof calls, ",%s,", which);
    kind_errno = error;
    wanted = at;
    how = lasting;
    jump_s = seconds;
    log_fd = log;
    atomic_store(&seen, 0);
    atomic_store(&armed, 1);
}

long fault_disarm(void) {
    atomic_store(&armed, 0);
    return atomic_load(&seen);
}

/* Returns whether this call, on this path, is to fail. */
static int hit(const char *name, const char *path) {
    char word[64], line[PATH_MAX + 128];
    if (!atomic_load(&armed) || inside)
        return 0;
    if (path && strncmp(path, directory, strlen(directory)) != 0)
        return 0;
    snprintf(word, sizeof word, ",%s,", name);
    if (!strstr(calls, word))
        return 0;
    int before = errno;
    inside = 1;
    long number = atomic_fetch_add(&seen, 1) + 1;
    int fails = wanted && (number == wanted || (how == LASTING && number > wanted));
    if (log_fd >= 0) {
        int length = snprintf(line, sizeof line, "%ld %s %s%s\n", number, name, path ? path : "-", fails ? " FAILS" : "");
        syscall(SYS_write, log_fd, line, (size_t)length);
    }
    inside = 0;
    errno = before;
    return fails;
}

static int hit_fd(const char *name, int fd) {
    char link[64], path[PATH_MAX];
    if (!atomic_load(&armed) || inside || fd == log_fd)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int before = errno;
    ssize_t length = syscall(SYS_readlink, link, path, sizeof path - 1);
    errno = before;
    if (length <= 0)
        return 0;
    path[length] = 0;
    return hit(name, path);
}

static int hit_at(const char *name, int fd, const char *path) {
    char full[PATH_MAX], link[64];
    if (!path || !atomic_load(&armed) || inside)
        return 0;
    if (path[0] == '/')
        return hit(name, path);
    int before = errno;
    ssize_t length;
    if (fd == AT_FDCWD)
        length = syscall(SYS_readlink, "/proc/self/cwd", full, sizeof full - 1);
    else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        length = syscall(SYS_readlink, link, full, sizeof full - 1);
    }
    errno = before;
    if (length <= 0 || (size_t)length + strlen(path) + 2 > sizeof full)
        return 0;
    full[length] = '/';
    strcpy(full + length + 1, path);
    return hit(name, full);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAILS()                \
    do {                       \
        errno = kind_errno;    \
        return -1;             \
    } while (0)

#define OPEN(name)                                             \
    int name(const char *path, int flags, ...) {               \
        va_list rest;                                          \
        va_start(rest, flags);                                 \
        mode_t mode = va_arg(rest, mode_t);                    \
        va_end(rest);                                          \
        if (hit_at(flags & O_CREAT ? "create" : "open", AT_FDCWD, path)) \
            FAILS();                                           \
        return REAL(name)(path, flags, mode);                  \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(name)                                           \
    int name(int fd, const char *path, int flags, ...) {       \
        va_list rest;                                          \
        va_start(rest, flags);                                 \
        mode_t mode = va_arg(rest, mode_t);                    \
        va_end(rest);                                          \
        if (hit_at(flags & O_CREAT ? "create" : "open", fd, path)) \
            FAILS();                                           \
        return REAL(name)(fd, path, flags, mode);              \
    }
OPENAT(openat)
OPENAT(openat64)
#define FOPEN(name)                                            \
    FILE *name(const char *path, const char *mode) {           \
        if (hit_at(mode[0] == 'r' ? "open" : "create", AT_FDCWD, path)) { \
            errno = kind_errno;                                \
            return NULL;                                       \
        }                                                      \
        return REAL(name)(path, mode);                         \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int fd, const void *data, size_t size) {
    if (hit_fd("write", fd)) {
        if (kind_errno != -1)
            FAILS();
        size = size > 1 ? size / 2 : size;
    }
    return REAL(write)(fd, data, size);
}
#define PWRITE(name, offset_t)                                          \
    ssize_t name(int fd, const void *data, size_t size, offset_t at) {  \
        if (hit_fd("pwrite", fd)) {                                     \
            if (kind_errno != -1)                                       \
                FAILS();                                                \
            size = size > 1 ? size / 2 : size;                          \
        }                                                               \
        return REAL(name)(fd, data, size, at);                          \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)
ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (hit_fd("writev", fd)) {
        if (kind_errno != -1)
            FAILS();
        return write(fd, parts[0].iov_base, parts[0].iov_len > 1 ? parts[0].iov_len / 2 : parts[0].iov_len);
    }
    return REAL(writev)(fd, parts, count);
}
#define PWRITEV(name, offset_t)                                                      \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_t at) {        \
        if (hit_fd("pwritev", fd)) {                                                 \
            if (kind_errno != -1)                                                    \
                FAILS();                                                             \
            return REAL(pwrite)(fd, parts[0].iov_base, parts[0].iov_len / 2 + 1, at); \
        }                                                                            \
        return REAL(name)(fd, parts, count, at);                                     \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)
ssize_t read(int fd, void *data, size_t size) {
    if (hit_fd("read", fd)) {
        if (kind_errno != -1)
            FAILS();
        size = size > 1 ? size / 2 : size;
    }
    return REAL(read)(fd, data, size);
}
#define PREAD(name, offset_t)                                     \
    ssize_t name(int fd, void *data, size_t size, offset_t at) {  \
        if (hit_fd("pread", fd)) {                                \
            if (kind_errno != -1)                                 \
                FAILS();                                          \
            size = size > 1 ? size / 2 : size;                    \
        }                                                         \
        return REAL(name)(fd, data, size, at);                    \
    }
PREAD(pread, off_t)
PREAD(pread64, off64_t)

#define ON_FD(name, declared, passed, label)  \
    int name declared {                       \
        if (hit_fd(label, fd))                \
            FAILS();                          \
        return REAL(name) passed;             \
    }
ON_FD(fsync, (int fd), (fd), "fsync")
ON_FD(fdatasync, (int fd), (fd), "fdatasync")
ON_FD(ftruncate, (int fd, off_t size), (fd, size), "ftruncate")
ON_FD(ftruncate64, (int fd, off64_t size), (fd, size), "ftruncate")
ON_FD(fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size), "fallocate")
ON_FD(fallocate64, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size), "fallocate")
int posix_fallocate(int fd, off_t at, off_t size) {
    return hit_fd("fallocate", fd) ? kind_errno : REAL(posix_fallocate)(fd, at, size);
}
int posix_fallocate64(int fd, off64_t at, off64_t size) {
    return hit_fd("fallocate", fd) ? kind_errno : REAL(posix_fallocate64)(fd, at, size);
}
/* A close that fails has closed. */
int close(int fd) {
    int fails = hit_fd("close", fd);
    int found = REAL(close)(fd);
    if (fails)
        FAILS();
    return found;
}

#define ON_PATH(name, declared, passed, label)   \
    int name declared {                          \
        if (hit_at(label, AT_FDCWD, path))       \
            FAILS();                             \
        return REAL(name) passed;                \
    }
#define ON_PATH_AT(name, declared, passed, label) \
    int name declared {                           \
        if (hit_at(label, fd, path))              \
            FAILS();                              \
        return REAL(name) passed;                 \
    }
ON_PATH(rename, (const char *path, const char *to), (path, to), "rename")
ON_PATH_AT(renameat, (int fd, const char *path, int fd2, const char *to), (fd, path, fd2, to), "rename")
ON_PATH_AT(renameat2, (int fd, const char *path, int fd2, const char *to, unsigned f), (fd, path, fd2, to, f), "rename")
ON_PATH(link, (const char *path, const char *to), (path, to), "link")
ON_PATH_AT(linkat, (int fd, const char *path, int fd2, const char *to, int f), (fd, path, fd2, to, f), "link")
ON_PATH(unlink, (const char *path), (path), "unlink")
ON_PATH_AT(unlinkat, (int fd, const char *path, int flags), (fd, path, flags), "unlink")
ON_PATH(rmdir, (const char *path), (path), "unlink")
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode), "mkdir")
ON_PATH_AT(mkdirat, (int fd, const char *path, mode_t mode), (fd, path, mode), "mkdir")

ssize_t sendfile(int fd, int from, off_t *at, size_t size) {
    if (hit_fd("sendfile", fd))
        FAILS();
    return REAL(sendfile)(fd, from, at, size);
}
ssize_t copy_file_range(int from, off64_t *at, int fd, off64_t *to, size_t size, unsigned flags) {
    if (hit_fd("sendfile", fd))
        FAILS();
    return REAL(copy_file_range)(from, at, fd, to, size, flags);
}
#define MMAP(name, offset_t)                                                               \
    void *name(void *place, size_t size, int protection, int flags, int fd, offset_t at) { \
        if (fd >= 0 && hit_fd("mmap", fd)) {                                               \
            errno = kind_errno;                                                            \
            return MAP_FAILED;                                                             \
        }                                                                                  \
        return REAL(name)(place, size, protection, flags, fd, at);                         \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

int clock_gettime(clockid_t clock, struct timespec *found) {
    int result = REAL(clock_gettime)(clock, found);
    if (clock == CLOCK_REALTIME && hit("clock", NULL))
        found->tv_sec += jump_s;
    return result;
}
