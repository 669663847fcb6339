/* Lets the Nth call of a kind on a file below a directory fail, for real as far as the caller can tell.
 *
 * Loaded by LD_PRELOAD. $REKINDLE_FAULTS names a file that holds a `struct control`, which all processes map: calls of
 * each kind are counted over all of them, and whoever has the file may arm, disarm and read the counts at any moment.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <dirent.h>

enum { OPEN_WRITE, OPEN_READ, WRITE, SYNC, RENAME, UNLINK, MKDIR, RMDIR, ALLOCATE, LIST, STAT, MMAP, READ, LOCK, KINDS };

struct control {
    volatile uint32_t armed, kind, error, nth, lasting, halve, fired, counts[KINDS];
    char prefix[400];
};

static struct control *control;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("REKINDLE_FAULTS");
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open64");
    int fd = path ? real(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *(*map)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap");
    void *found = map(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (found != MAP_FAILED) control = found;
    close(fd);
}

static int below(const char *path) {
    return path && !strncmp(path, control->prefix, strlen(control->prefix));
}

static const char *path_of(int fd, char *buffer, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, buffer, size - 1);
    if (length < 0) return NULL;
    buffer[length] = 0;
    return buffer;
}

/* 0: go on; 1: errno is set, fail; 2: do half of it */
static int strike(int kind, const char *path) {
    int before = errno;
    if (!control || !control->armed || !below(path)) return 0;
    uint32_t number = __atomic_add_fetch(&control->counts[kind], 1, __ATOMIC_SEQ_CST);
    if ((int)control->kind != kind || !control->nth) return 0;
    if (number != control->nth && !(control->lasting && number > control->nth)) return 0;
    __atomic_add_fetch(&control->fired, 1, __ATOMIC_SEQ_CST);
    errno = control->halve ? before : (int)control->error;
    return control->halve ? 2 : 1;
}

static int strike_fd(int kind, int fd) {
    char buffer[4096];
    if (!control || !control->armed) return 0;
    int before = errno;
    const char *path = path_of(fd, buffer, sizeof buffer);
    errno = before;
    return strike(kind, path);
}

#define REAL(name) static typeof(&name) real; if (!real) real = (typeof(&name))dlsym(RTLD_NEXT, #name)

static int strike_open(const char *path, int flags) {
    char buffer[4096];
    if (path && !strncmp(path, "/proc/self/fd/", 14)) path = path_of(atoi(path + 14), buffer, sizeof buffer);
    return strike(flags & (O_WRONLY | O_RDWR | O_CREAT) ? OPEN_WRITE : OPEN_READ, path);
}

#define OPEN(name)                                                                     \
    int name(const char *path, int flags, ...) {                                       \
        REAL(name);                                                                    \
        va_list more;                                                                  \
        va_start(more, flags);                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;        \
        va_end(more);                                                                  \
        return strike_open(path, flags) ? -1 : real(path, flags, mode);                \
    }
OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void *data, size_t n) {
    REAL(write);
    int how = strike_fd(WRITE, fd);
    return how == 1 ? -1 : real(fd, data, how == 2 && n > 1 ? n / 2 : n);
}

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
    REAL(pwrite64);
    int how = strike_fd(WRITE, fd);
    if (how == 2 && n > 4096) n = n / 8192 * 4096; /* whole pages: direct I/O refuses others */
    return how == 1 ? -1 : real(fd, data, n, at);
}

ssize_t read(int fd, void *data, size_t n) {
    REAL(read);
    int how = strike_fd(READ, fd);
    return how == 1 ? -1 : real(fd, data, how == 2 && n > 1 ? n / 2 : n);
}

ssize_t pread64(int fd, void *data, size_t n, off64_t at) {
    REAL(pread64);
    int how = strike_fd(READ, fd);
    if (how == 2 && n > 4096) n = n / 8192 * 4096;
    return how == 1 ? -1 : real(fd, data, n, at);
}

int fsync(int fd) { REAL(fsync); return strike_fd(SYNC, fd) ? -1 : real(fd); }
int rename(const char *a, const char *b) { REAL(rename); return strike(RENAME, b) ? -1 : real(a, b); }
int unlink(const char *path) { REAL(unlink); return strike(UNLINK, path) ? -1 : real(path); }
int rmdir(const char *path) { REAL(rmdir); return strike(RMDIR, path) ? -1 : real(path); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return strike(MKDIR, path) ? -1 : real(path, mode); }
DIR *opendir(const char *path) { REAL(opendir); return strike(LIST, path) ? NULL : real(path); }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); return strike_fd(ALLOCATE, fd) ? -1 : real(fd, n); }
int fallocate(int fd, int how, off_t at, off_t n) { REAL(fallocate); return strike_fd(ALLOCATE, fd) ? -1 : real(fd, how, at, n); }
int posix_fallocate64(int fd, off64_t at, off64_t n) { REAL(posix_fallocate64); return strike_fd(ALLOCATE, fd) ? errno : real(fd, at, n); }
int flock(int fd, int how) { REAL(flock); return strike_fd(LOCK, fd) ? -1 : real(fd, how); }
int stat64(const char *path, struct stat64 *s) { REAL(stat64); return strike(STAT, path) ? -1 : real(path, s); }
int lstat64(const char *path, struct stat64 *s) { REAL(lstat64); return strike(STAT, path) ? -1 : real(path, s); }
int fstat64(int fd, struct stat64 *s) { REAL(fstat64); return strike_fd(STAT, fd) ? -1 : real(fd, s); }

void *mmap64(void *at, size_t n, int protection, int flags, int fd, off64_t offset) {
    REAL(mmap64);
    return fd >= 0 && strike_fd(MMAP, fd) ? MAP_FAILED : real(at, n, protection, flags, fd, offset);
}
