/*
 * What the kernel answers to a lab node where no file can: preloaded into every program of the node
 * (ld.so(8), /etc/ld.so.preload). Built by lab/syscall_shim.py.
 *
 *   adjtimex   says what the simulated machine's clock is: machine/clock, "SYNCHRONISED ERROR_US"
 *   statvfs    finds no more free on the node's disk than the machine has: machine/free_mib
 *   clock_gettime, gettimeofday, time
 *              of day are later by machine/clock_offset, in seconds; on the controller, which has
 *              no such file, by the variable GPUFLEET_LAB_CLOCK_OFFSET. Times of files are true
 *   open       of /proc/modules finds machine/proc/modules; only where this kernel is built without
 *              modules and has no such file, so that nothing could be mounted over it
 *
 * Whoever sets the clock asks the real kernel.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <time.h>
#include <unistd.h>

#define MACHINE "/var/lib/gpufleet-lab/machine/"

/* How many of the two numbers a file holds; the caller's errno stays. */
static int numbers(const char *path, long *first, long *second)
{
    int saved = errno, found = 0;
    FILE *file = fopen(path, "re");
    if (file) {
        found = fscanf(file, "%ld %ld", first, second);
        fclose(file);
    }
    errno = saved;
    return found;
}

/* How much later than this machine's clock the node's is, looked for once a second. systemd (pid 1)
 * has the true one: it has the kernel wake it, which goes by that. */
static long offset(void)
{
    static long known, unused;
    static time_t looked = -1;
    struct timespec up;
    if (getpid() == 1 || syscall(SYS_clock_gettime, CLOCK_MONOTONIC_COARSE, &up) != 0)
        return 0;
    if (up.tv_sec != looked) {
        const char *told = getenv("GPUFLEET_LAB_CLOCK_OFFSET");
        looked = up.tv_sec;
        if (numbers(MACHINE "clock_offset", &known, &unused) < 1)
            known = told ? atol(told) : 0;
    }
    return known;
}

int clock_gettime(clockid_t which, struct timespec *found)
{
    static int (*ask)(clockid_t, struct timespec *);
    if (!ask)
        *(void **)&ask = dlsym(RTLD_NEXT, "clock_gettime");
    int result = ask(which, found);
    if (result == 0 && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        found->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone)
{
    int result = (int)syscall(SYS_gettimeofday, found, zone);
    if (result == 0)
        found->tv_sec += offset();
    return result;
}

time_t time(time_t *found)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found)
        *found = now.tv_sec;
    return now.tv_sec;
}

static int clock_of_machine(struct timex *asked)
{
    long synchronised, error;
    struct timespec now;
    if (asked->modes != 0 || numbers(MACHINE "clock", &synchronised, &error) != 2)
        return (int)syscall(SYS_adjtimex, asked);
    clock_gettime(CLOCK_REALTIME, &now);
    memset(asked, 0, sizeof *asked);
    asked->maxerror = asked->esterror = error;
    asked->status = synchronised ? STA_PLL : STA_UNSYNC;
    asked->tick = 10000;
    asked->time.tv_sec = now.tv_sec;
    asked->time.tv_usec = now.tv_nsec / 1000;
    return synchronised ? TIME_OK : TIME_ERROR;
}

int adjtimex(struct timex *asked) { return clock_of_machine(asked); }
int ntp_adjtime(struct timex *asked) { return clock_of_machine(asked); }

/* The most blocks that are free of the file system `id`; those of others than the disk are real. */
static unsigned long most(unsigned long id, unsigned long block, unsigned long real)
{
    static int (*ask)(const char *, struct statvfs64 *);
    struct statvfs64 root;
    long mib, unused;
    if (numbers(MACHINE "free_mib", &mib, &unused) < 1 || block == 0)
        return real;
    if (!ask)
        *(void **)&ask = dlsym(RTLD_NEXT, "statvfs64");
    if (!ask || ask("/", &root) != 0 || root.f_fsid != id)
        return real;
    unsigned long simulated = ((unsigned long)mib << 20) / block;
    return simulated < real ? simulated : real;
}

#define STATVFS(NAME, OF, ABOUT)                                                                   \
    int NAME(OF of, ABOUT *about)                                                                  \
    {                                                                                              \
        static int (*ask)(OF, ABOUT *);                                                            \
        if (!ask)                                                                                  \
            *(void **)&ask = dlsym(RTLD_NEXT, #NAME);                                              \
        int result = ask(of, about);                                                               \
        if (result == 0) {                                                                         \
            about->f_bavail = most(about->f_fsid, about->f_frsize, about->f_bavail);               \
            about->f_bfree = most(about->f_fsid, about->f_frsize, about->f_bfree);                 \
        }                                                                                          \
        return result;                                                                             \
    }

typedef const char *path_t;
STATVFS(statvfs, path_t, struct statvfs)
STATVFS(statvfs64, path_t, struct statvfs64)
STATVFS(fstatvfs, int, struct statvfs)
STATVFS(fstatvfs64, int, struct statvfs64)

#ifdef WITHOUT_MODULES

static const char *place(const char *path)
{
    return path && strcmp(path, "/proc/modules") == 0 ? MACHINE "proc/modules" : path;
}

/* By the system call itself: allocators open files before dlsym could find the real function. */
static int opened(int folder, const char *path, int flags, va_list more)
{
    int creates = (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE;
    return (int)syscall(SYS_openat, folder, place(path), flags, creates ? va_arg(more, mode_t) : 0);
}

#define OPEN(NAME)                                                                                 \
    int NAME(const char *path, int flags, ...)                                                     \
    {                                                                                              \
        va_list more;                                                                              \
        va_start(more, flags);                                                                     \
        int file = opened(AT_FDCWD, path, flags, more);                                            \
        va_end(more);                                                                              \
        return file;                                                                               \
    }
#define OPENAT(NAME)                                                                               \
    int NAME(int folder, const char *path, int flags, ...)                                         \
    {                                                                                              \
        va_list more;                                                                              \
        va_start(more, flags);                                                                     \
        int file = opened(folder, path, flags, more);                                              \
        va_end(more);                                                                              \
        return file;                                                                               \
    }
#define FOPEN(NAME)                                                                                \
    FILE *NAME(const char *path, const char *mode)                                                 \
    {                                                                                              \
        static FILE *(*ask)(const char *, const char *);                                           \
        if (!ask)                                                                                  \
            *(void **)&ask = dlsym(RTLD_NEXT, #NAME);                                              \
        return ask(place(path), mode);                                                             \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)

#endif
