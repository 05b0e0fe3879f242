/* Lets a test set the clocks of a process tree, in mid-run, together: CLOCKSHIM names a file of two int64, seconds added
   to the time of day and to the clocks that nobody sets (CLOCK_MONOTONIC, CLOCK_BOOTTIME). Waits for a point in time are
   given to the kernel as it counts; those for a duration need nothing.

   cc -shared -fPIC -O2 -o clockshim.so clockshim.c -ldl */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *added;

__attribute__((constructor)) static void map(void) {
    const char *path = getenv("CLOCKSHIM");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *memory = mmap(NULL, 2 * sizeof *added, PROT_READ, MAP_SHARED, fd, 0);
    if (memory != MAP_FAILED) added = memory;
    close(fd);
}

static int64_t of(clockid_t clock) {
    if (!added) return 0;
    switch (clock) {
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE: return added[0];
    case CLOCK_MONOTONIC:
    case CLOCK_MONOTONIC_RAW:
    case CLOCK_MONOTONIC_COARSE:
    case CLOCK_BOOTTIME: return added[1];
    default: return 0;
    }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(clock, now);
    if (!done) now->tv_sec += of(clock);
    return done;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    int done = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return done;
}

time_t time(time_t *where) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where) *where = exact.tv_sec;
    return exact.tv_sec;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    static int (*real)(clockid_t, int, const struct timespec *, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_nanosleep");
    struct timespec kernel = {until->tv_sec - (flags & TIMER_ABSTIME ? of(clock) : 0), until->tv_nsec};
    return real(clock, flags, &kernel, left);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict until) {
    static int (*real)(sem_t *, clockid_t, const struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "sem_clockwait");
    struct timespec kernel = {until->tv_sec - of(clock), until->tv_nsec};
    return real(semaphore, clock, &kernel);
}

int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    struct timespec kernel = {until->tv_sec - of(clock), until->tv_nsec};
    return real(condition, mutex, clock, &kernel);
}
