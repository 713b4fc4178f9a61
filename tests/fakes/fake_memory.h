/* Memory of the fake drivers: host memory that is registered and gets other addresses for the devices, and the devices'.

   A registered range has a second mapping of the same pages for every device, each at an address that has nothing to do
   with the host's. Private pages have no second mapping, so they are replaced, in place, by pages of a memory file. */
#pragma once
#include "fake_calls.h"

#define MAX_RANGES 8192
#define PAGE 4096ull
#define ALIAS_ALIGNMENT (2ull << 20)
#define ALIAS_BEGIN 0x200000000ull /* where WSL puts them (sglang#40232) */
#define ALIAS_END 0x10000000000ull

typedef struct {
  uint64_t base, nbytes;
  uint64_t alias[MAX_DEVICES];
  unsigned flags;
  int allocated, aliased;
} registration;

typedef struct {
  uint64_t begin, end;
  int device;
} device_memory;

static registration registrations[MAX_RANGES];
static int n_registrations;
static device_memory allocations[MAX_RANGES];
static int n_allocations;
static uint64_t random_state = 1, register_limit;
static int register_limit_code;

static void drop_aliases(registration *r) {
  for (int d = 0; d < MAX_DEVICES; d++)
    if (r->aliased && r->alias[d]) munmap((void *)r->alias[d], r->nbytes);
}

static void reset_memory(void) {
  for (int i = 0; i < n_registrations; i++) {
    drop_aliases(&registrations[i]);
    if (registrations[i].allocated) munmap((void *)registrations[i].base, registrations[i].nbytes);
  }
  for (int i = 0; i < n_allocations; i++)
    munmap((void *)allocations[i].begin, allocations[i].end - allocations[i].begin);
  n_registrations = n_allocations = 0;
  register_limit = 0;
}

/* A registration of more bytes than that answers `code`; 0: no limit. */
EXPORT void fake_set_register_limit(uint64_t nbytes, int code) {
  register_limit = nbytes;
  register_limit_code = code;
}

/* ---- host memory ------------------------------------------------------------------------------------------------ */

static uint64_t random_address(uint64_t nbytes) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  uint64_t room = (ALIAS_END - ALIAS_BEGIN - nbytes) / ALIAS_ALIGNMENT;
  return ALIAS_BEGIN + (random_state >> 20) % room * ALIAS_ALIGNMENT;
}

/* Address space that nobody uses, at an address that has nothing to do with any other; 0: none. */
static uint64_t reserve(uint64_t nbytes) {
  for (int attempt = 0; attempt < 64 && nbytes < ALIAS_END - ALIAS_BEGIN; attempt++) {
    void *hint = (void *)random_address(nbytes);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void *got = mmap(hint, nbytes, PROT_NONE, flags, -1, 0);
    if (got == hint) return (uint64_t)got;
    if (got != MAP_FAILED) munmap(got, nbytes);
  }
  return 0;
}

enum { READABLE = 1, WRITABLE = 2, SHARED = 4 };

/* What all of the range has in common; -1 when a part of it is not mapped. */
static int protection_of(uint64_t base, uint64_t nbytes) {
  FILE *maps = fopen("/proc/self/maps", "r");
  if (!maps) return -1;
  uint64_t reached = base;
  int common = READABLE | WRITABLE | SHARED;
  char line[8192];
  while (reached < base + nbytes && fgets(line, sizeof line, maps)) {
    unsigned long long begin, end;
    char p[5];
    if (sscanf(line, "%llx-%llx %4s", &begin, &end, p) != 3 || end <= reached) continue;
    if (begin > reached) break;
    common &= (p[0] == 'r' ? READABLE : 0) | (p[1] == 'w' ? WRITABLE : 0) | (p[3] == 's' ? SHARED : 0);
    reached = end;
  }
  fclose(maps);
  return reached < base + nbytes ? -1 : common;
}

/* The same bytes at the same address, but shared. */
static int make_shared(uint64_t base, uint64_t nbytes, int protection) {
  int fd = memfd_create("fake-driver", MFD_CLOEXEC);
  if (fd < 0) return OUT_OF_MEMORY;
  void *copy = MAP_FAILED;
  if (!ftruncate(fd, (off_t)nbytes)) copy = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (copy == MAP_FAILED) {
    close(fd);
    return OUT_OF_MEMORY;
  }
  memcpy(copy, (void *)base, nbytes);
  munmap(copy, nbytes);
  int prot = PROT_READ | (protection & WRITABLE ? PROT_WRITE : 0);
  void *placed = mmap((void *)base, nbytes, prot, MAP_SHARED | MAP_FIXED, fd, 0);
  close(fd);
  return placed == MAP_FAILED ? OUT_OF_MEMORY : OK;
}

static int overlaps(uint64_t base, uint64_t nbytes) {
  for (int i = 0; i < n_registrations; i++)
    if (base < registrations[i].base + registrations[i].nbytes && registrations[i].base < base + nbytes) return 1;
  return 0;
}

static registration *holding(uint64_t address) {
  for (int i = 0; i < n_registrations; i++)
    if (address >= registrations[i].base && address < registrations[i].base + registrations[i].nbytes)
      return &registrations[i];
  return NULL;
}

static int add_registration(uint64_t base, uint64_t nbytes, unsigned flags, int allocated) {
  if (n_registrations == MAX_RANGES) return OUT_OF_MEMORY;
  registration r = {.base = base, .nbytes = nbytes, .flags = flags, .allocated = allocated, .aliased = alias_mode};
  for (int d = 0; d < n_devices; d++) {
    r.alias[d] = base;
    if (!alias_mode) continue;
    /* mremap with an old size of 0 maps shared pages a second time (man 2 mremap). */
    r.alias[d] = reserve(nbytes);
    void *at = (void *)r.alias[d];
    if (!at || mremap((void *)base, 0, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, at) != at) {
      drop_aliases(&r);
      return OUT_OF_MEMORY;
    }
  }
  registrations[n_registrations++] = r;
  return OK;
}

static int host_register(uint64_t base, uint64_t nbytes, unsigned flags, int read_only) {
  if (!base || !nbytes || base % PAGE || nbytes % PAGE || base + nbytes < base) return INVALID_VALUE;
  if (register_limit && nbytes > register_limit) return register_limit_code;
  if (overlaps(base, nbytes)) return ALREADY_REGISTERED;
  int protection = protection_of(base, nbytes);
  if (protection < 0 || !(protection & READABLE)) return INVALID_VALUE;
  if (!read_only && !(protection & WRITABLE)) return INVALID_VALUE;
  int code = alias_mode && !(protection & SHARED) ? make_shared(base, nbytes, protection) : OK;
  return code ? code : add_registration(base, nbytes, flags, 0);
}

static int drop_registration(uint64_t base, int allocated, int missing) {
  for (int i = 0; i < n_registrations; i++) {
    registration *r = &registrations[i];
    if (r->base != base || r->allocated != allocated) continue;
    drop_aliases(r);
    if (allocated) munmap((void *)base, r->nbytes);
    *r = registrations[--n_registrations];
    return OK;
  }
  return missing;
}

static int host_alloc(void **address, uint64_t nbytes, unsigned flags) {
  if (!address || !nbytes) return INVALID_VALUE;
  uint64_t whole = (nbytes + PAGE - 1) / PAGE * PAGE;
  void *at = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return OUT_OF_MEMORY;
  int code = add_registration((uint64_t)at, whole, flags, 1);
  if (code)
    munmap(at, whole);
  else
    *address = at;
  return code;
}

static int host_device_pointer(unsigned long long *pointer, uint64_t address, unsigned flags) {
  registration *r = holding(address);
  if (!pointer || flags || !r || !r->alias[current_device()]) return INVALID_VALUE;
  *pointer = r->alias[current_device()] + (address - r->base);
  return OK;
}

static int host_flags(unsigned *flags, uint64_t address) {
  registration *r = holding(address);
  if (!flags || !r) return INVALID_VALUE;
  *flags = r->flags;
  return OK;
}

/* ---- device memory and copies ----------------------------------------------------------------------------------- */

static int device_alloc(unsigned long long *address, uint64_t nbytes) {
  if (!address || !nbytes) return INVALID_VALUE;
  if (n_allocations == MAX_RANGES) return OUT_OF_MEMORY;
  void *at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return OUT_OF_MEMORY;
  allocations[n_allocations++] = (device_memory){(uint64_t)at, (uint64_t)at + nbytes, current_device()};
  *address = (uint64_t)at;
  return OK;
}

static int device_free(uint64_t address) {
  if (!address) return OK;
  for (int i = 0; i < n_allocations; i++)
    if (allocations[i].begin == address) {
      munmap((void *)address, allocations[i].end - address);
      allocations[i] = allocations[--n_allocations];
      return OK;
    }
  return INVALID_VALUE;
}

static int in_device_range(uint64_t address, uint64_t nbytes) {
  int device = current_device();
  for (int i = 0; i < n_allocations; i++)
    if (allocations[i].device == device && address >= allocations[i].begin && address + nbytes <= allocations[i].end)
      return 1;
  for (int i = 0; i < n_registrations; i++) {
    uint64_t alias = registrations[i].alias[device];
    if (alias && address >= alias && address + nbytes <= alias + registrations[i].nbytes) return 1;
  }
  return 0;
}

static int device_operand_ok(uint64_t address, uint64_t nbytes) {
  return in_device_range(address, nbytes) ? OK : INVALID_VALUE;
}

static int copy_to_device(uint64_t dst, uint64_t src, uint64_t nbytes) {
  if (!src || !in_device_range(dst, nbytes)) return INVALID_VALUE;
  memmove((void *)dst, (void *)src, nbytes);
  return OK;
}

static int copy_to_host(uint64_t dst, uint64_t src, uint64_t nbytes) {
  if (!dst || !in_device_range(src, nbytes)) return INVALID_VALUE;
  memmove((void *)dst, (void *)src, nbytes);
  return OK;
}

#ifndef NO_BATCH
/* A host range is ordinary memory, or lies in one registration. */
static int crosses_registrations(uint64_t address, uint64_t nbytes) {
  registration *r = holding(address);
  return r ? address + nbytes > r->base + r->nbytes : overlaps(address, nbytes);
}

/* Checks every range before it moves the first. */
static int copy_batch(const uint64_t *dsts, const uint64_t *srcs, const size_t *sizes, size_t count, size_t *failed) {
  if (!dsts || !srcs || !sizes || !count) return INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    int to_device = in_device_range(dsts[i], sizes[i]), from_device = in_device_range(srcs[i], sizes[i]);
    if (!dsts[i] || !srcs[i] || !sizes[i] || !(to_device || from_device) ||
        (!to_device && crosses_registrations(dsts[i], sizes[i])) ||
        (!from_device && crosses_registrations(srcs[i], sizes[i]))) {
      if (failed) *failed = i;
      return INVALID_VALUE;
    }
  }
  for (size_t i = 0; i < count; i++) memmove((void *)dsts[i], (void *)srcs[i], sizes[i]);
  return OK;
}
#endif
