/* Streams and events of the fake drivers: everything has run when the call returns. */
#pragma once
#include "fake_memory.h"

enum { STREAM = 0x57, EVENT = 0xE7 };

typedef struct {
  int kind, device, timing, recorded, capturing;
  struct timespec when;
} handle;

static handle *handles[4096];
static int n_handles;

static void reset_streams(void) {
  for (int i = 0; i < n_handles; i++) free(handles[i]);
  n_handles = 0;
}

static int new_handle(void **out, int kind, int timing) {
  if (!out) return INVALID_VALUE;
  if (n_handles == (int)(sizeof handles / sizeof handles[0])) return OUT_OF_MEMORY;
  handle *h = calloc(1, sizeof *h);
  *h = (handle){.kind = kind, .device = current_device(), .timing = timing};
  *out = handles[n_handles++] = h;
  return OK;
}

static int find_handle(void *h, int kind) {
  for (int i = 0; i < n_handles; i++)
    if (handles[i] == h && handles[i]->kind == kind) return i;
  return -1;
}

static int drop_handle(void *h, int kind) {
  int i = find_handle(h, kind);
  if (i < 0) return INVALID_HANDLE;
  free(handles[i]);
  handles[i] = handles[--n_handles];
  return OK;
}

/* 0, 1 and 2 are the default streams. A stream belongs to the device that was current when it was made. */
static int stream_ok(void *stream) {
  if ((uintptr_t)stream <= 2) return OK;
  int i = find_handle(stream, STREAM);
  return i >= 0 && handles[i]->device == current_device() ? OK : INVALID_HANDLE;
}

static int stream_capturing(void *stream) {
  int i = find_handle(stream, STREAM);
  return i >= 0 && handles[i]->capturing;
}

/* Let a stream answer that it is captured (1 active). */
EXPORT int fake_set_capturing(void *stream, int status) {
  int i = find_handle(stream, STREAM);
  if (i >= 0) handles[i]->capturing = status;
  return i >= 0 ? 0 : -1;
}

static int capture_status(void *stream, int *status) {
  if (!status) return INVALID_VALUE;
  int code = stream_ok(stream);
  if (!code) *status = stream_capturing(stream);
  return code;
}

static int event_ok(void *event) { return find_handle(event, EVENT) >= 0 ? OK : INVALID_HANDLE; }

static int event_record(void *event, void *stream) {
  int code = event_ok(event);
  if (!code) code = stream_ok(stream);
  if (code) return code;
  handle *h = event;
  h->recorded = 1;
  clock_gettime(CLOCK_MONOTONIC, &h->when);
  return OK;
}

static int event_elapsed(float *ms, void *start, void *end) {
  handle *a = start, *b = end;
  if (event_ok(start) || event_ok(end) || !a->timing || !b->timing || !a->recorded || !b->recorded)
    return INVALID_HANDLE;
  *ms = (float)((double)(b->when.tv_sec - a->when.tv_sec) * 1e3 + (double)(b->when.tv_nsec - a->when.tv_nsec) * 1e-6);
  return OK;
}

static int event_wait(void *stream, void *event) {
  int code = event_ok(event);
  return code ? code : stream_ok(stream);
}
