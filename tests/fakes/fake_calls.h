/* What every call of a fake driver goes through: a lock, failures on demand, and a log.

   One lock covers every call: `fake_enter` takes it, `fake_leave` writes the log line and gives it back. */
#pragma once
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 8

/* Both vendors use these numbers. */
enum {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  NO_BINARY = 209,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
};

/* ---- state ------------------------------------------------------------------------------------------------------ */

typedef struct {
  char call[64];
  int nth, code;
} failure;

typedef struct {
  int attribute, value;
} override;

static pthread_mutex_t fake_mutex = PTHREAD_MUTEX_INITIALIZER;
static failure failures[64];
static int n_failures;
static override overrides[64];
static int n_overrides;
static int n_devices = 1, alias_mode = 1, faulted[MAX_DEVICES];
static pid_t initialised_by; /* 0: nobody */
static char *log_text, *log_taken;
static size_t log_used, log_room;

/* The device that the calling thread works on, or -1: contexts in CUDA, a number in HIP. */
static int current_device(void);
/* The parts of fake_reset. */
static void reset_memory(void), reset_streams(void), reset_platform(void);

static void log_text_add(const char *format, va_list values) {
  va_list again;
  va_copy(again, values);
  size_t needed = (size_t)vsnprintf(NULL, 0, format, again) + 1;
  va_end(again);
  if (log_used + needed > log_room) log_text = realloc(log_text, log_room = 2 * (log_used + needed));
  log_used += (size_t)vsnprintf(log_text + log_used, needed, format, values);
}

static void log_add(const char *format, ...) {
  va_list values;
  va_start(values, format);
  log_text_add(format, values);
  va_end(values);
}

/* ---- how a call begins and ends --------------------------------------------------------------------------------- */

enum { ANYTIME, INITIALISED, CONTEXT };

static int programmed_failure(const char *call) {
  for (int i = 0; i < n_failures; i++) {
    failure *f = &failures[i];
    if (strcmp(f->call, call)) continue;
    if (f->nth == 0) return f->code;
    if (f->nth > 0 && --f->nth == 0) {
      f->nth = -1; /* spent */
      return f->code;
    }
  }
  return OK;
}

static int fake_enter(const char *call, int needs) {
  pthread_mutex_lock(&fake_mutex);
  int code = programmed_failure(call);
  if (code) return code;
  if (needs >= INITIALISED && initialised_by != getpid()) return NOT_INITIALIZED; /* also in a forked child */
  if (needs >= CONTEXT) {
    int device = current_device();
    if (device < 0) return INVALID_CONTEXT;
    if (faulted[device]) return ILLEGAL_ADDRESS;
  }
  return OK;
}

__attribute__((format(printf, 3, 4))) static int fake_leave(int code, const char *call, const char *format, ...) {
  va_list values;
  va_start(values, format);
  log_add("%s", call);
  log_text_add(format, values);
  va_end(values);
  log_add(" device=%d result=%d\n", current_device(), code);
  pthread_mutex_unlock(&fake_mutex);
  return code;
}

/* One line a call: its name, what it needs, the work, and the values for the log (each " key=value"). */
#define CALL(call, needs, work, ...)                  \
  do {                                                \
    int code_ = fake_enter(call, needs);              \
    if (!code_) code_ = (work);                       \
    return fake_leave(code_, call, __VA_ARGS__);      \
  } while (0)

/* ---- controls --------------------------------------------------------------------------------------------------- */

EXPORT void fake_reset(void) {
  pthread_mutex_lock(&fake_mutex);
  reset_memory();
  reset_streams();
  reset_platform();
  n_failures = n_overrides = 0;
  n_devices = alias_mode = 1;
  memset(faulted, 0, sizeof faulted);
  log_used = 0;
  pthread_mutex_unlock(&fake_mutex);
}

/* Let the nth call of that name from now on answer `code`; nth = 0: every one. */
EXPORT int fake_fail(const char *call, int nth, int code) {
  pthread_mutex_lock(&fake_mutex);
  int room = n_failures < (int)(sizeof failures / sizeof failures[0]);
  if (room) {
    failure *f = &failures[n_failures++];
    snprintf(f->call, sizeof f->call, "%s", call);
    f->nth = nth;
    f->code = code;
  }
  pthread_mutex_unlock(&fake_mutex);
  return room ? 0 : -1;
}

/* The log so far, one call a line; it starts anew. The text is good until the next time. */
EXPORT const char *fake_log_take(void) {
  pthread_mutex_lock(&fake_mutex);
  free(log_taken);
  log_taken = log_used ? strndup(log_text, log_used) : strdup("");
  log_used = 0;
  pthread_mutex_unlock(&fake_mutex);
  return log_taken;
}

/* 0: registered memory keeps its host address. For registrations from now on. */
EXPORT void fake_set_alias(int on) { alias_mode = on; }

EXPORT int fake_set_devices(int n) {
  if (n < 0 || n > MAX_DEVICES) return -1;
  n_devices = n;
  return 0;
}

EXPORT int fake_set_attribute(int attribute, int value) {
  if (n_overrides == (int)(sizeof overrides / sizeof overrides[0])) return -1;
  overrides[n_overrides++] = (override){attribute, value};
  return 0;
}

static int overridden(int attribute, int *value) {
  for (int i = n_overrides; i-- > 0;)
    if (overrides[i].attribute == attribute) {
      *value = overrides[i].value;
      return 1;
    }
  return 0;
}
