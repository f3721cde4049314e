/* A wall clock of one's own that somebody steps, as NTP or a hypervisor does: for LD_PRELOAD.

   $TEST_CLOCKS/$RANK is a file of eight bytes, the seconds by which the clock of a process with
   that RANK is ahead. The monotonic clock stays as it is. Deadlines that are given on the wall clock
   are taken back to the real one before the kernel sees them. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t none, *ahead = &none;

__attribute__((constructor)) static void open_clock(void) {
  const char *folder = getenv("TEST_CLOCKS"), *rank = getenv("RANK");
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", folder ? folder : "", rank ? rank : "client");
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  void *seen = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  if (seen != MAP_FAILED) ahead = seen;
  close(file);
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

int clock_gettime(clockid_t clock, struct timespec *now) {
  REAL(clock_gettime);
  int code = real(clock, now);
  if (!code && is_wall(clock)) now->tv_sec += *ahead;
  return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  REAL(gettimeofday);
  int code = real(now, zone);
  if (!code) now->tv_sec += *ahead;
  return code;
}

time_t time(time_t *where) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (where) *where = now.tv_sec;
  return now.tv_sec;
}

static const struct timespec *back(const struct timespec *until, struct timespec *room) {
  *room = *until;
  room->tv_sec -= *ahead;
  return room;
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
  REAL(sem_timedwait);
  struct timespec room;
  return real(sem, back(until, &room));
}

int sem_clockwait(sem_t *restrict sem, clockid_t clock, const struct timespec *restrict until) {
  REAL(sem_clockwait);
  struct timespec room;
  return real(sem, clock, is_wall(clock) ? back(until, &room) : until);
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  REAL(pthread_cond_timedwait);
  /* A condition may have been made for the monotonic clock: what is far from the wall's is its. */
  struct timespec now, room;
  clock_gettime(CLOCK_MONOTONIC, &now);
  int monotonic = until->tv_sec < now.tv_sec + 1000000000;
  return real(cond, mutex, monotonic ? until : back(until, &room));
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           clockid_t clock, const struct timespec *restrict until) {
  REAL(pthread_cond_clockwait);
  struct timespec room;
  return real(cond, mutex, clock, is_wall(clock) ? back(until, &room) : until);
}
