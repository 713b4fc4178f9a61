// What differs between CUDA, HIP and the host stand-in, and nothing else.
//
// One compiler front end (clang) builds all three without any vendor header, so every builtin used here is the
// compiler's own. A kernel gets its place in the grid and its memory accesses through the names below only.
#pragma once

typedef unsigned char kv_u8;
typedef unsigned int kv_u32;
typedef unsigned long long kv_u64;
typedef int kv_i32;
typedef long long kv_i64;
typedef kv_u32 kv_word4 __attribute__((ext_vector_type(4)));

#if defined(__NVPTX__) || defined(__AMDGCN__)

#define KV_DEVICE static __attribute__((device)) inline __attribute__((always_inline))
#define KV_GLOBAL __attribute__((address_space(1)))

// Where a thread stands. On a GPU the registers say it.
struct kv_thread {
  kv_u32 thread, cta;
};

#else  // the host stand-in: ordinary memory, every access checked

#define KV_DEVICE static inline __attribute__((always_inline))
#define KV_GLOBAL

// A range of device addresses, end exclusive; `kv_host_launch` is given all that exist, sorted.
struct kv_range {
  kv_u64 begin, end;
};

struct kv_fault {
  kv_u64 address, nbytes;
  kv_u32 is_write, happened;
};

struct kv_thread {
  kv_u32 thread, cta;
  const kv_range *ranges;
  kv_u32 n_ranges;
  kv_fault *fault;
  kv_range last;  // the range that served the last access: nearly always the next one too
};

#endif

#if defined(__NVPTX__)

#define KV_WARP 32u
#define KV_KERNEL(name, args) \
  extern "C" __attribute__((global, launch_bounds(1024))) void name(const __attribute__((grid_constant)) args a)
#define KV_ENTER kv_thread{(kv_u32)__nvvm_read_ptx_sreg_tid_x(), (kv_u32)__nvvm_read_ptx_sreg_ctaid_x()}

// Rows are read once and written once: they stay out of L1. The volatile keeps all loads of a batch before its stores.
#define KV_NV_WORD(type, suffix, constraint, store_constraint)                                                 \
  KV_DEVICE void kv_load_row(kv_thread &, kv_u64 p, type &word) {                                              \
    asm volatile("ld.global.L1::no_allocate." suffix " %0, [%1];" : constraint(word) : "l"(p));                \
  }                                                                                                            \
  KV_DEVICE void kv_store_row(kv_thread &, kv_u64 p, type word) {                                              \
    asm volatile("st.global.cs." suffix " [%0], %1;" ::"l"(p), store_constraint(word) : "memory");             \
  }
KV_NV_WORD(kv_u64, "u64", "=l", "l")
KV_NV_WORD(kv_u32, "u32", "=r", "r")
KV_DEVICE void kv_load_row(kv_thread &, kv_u64 p, kv_u8 &word) {
  kv_u32 wide;  // PTX has no 8-bit register
  asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=r"(wide) : "l"(p));
  word = (kv_u8)wide;
}
KV_DEVICE void kv_store_row(kv_thread &, kv_u64 p, kv_u8 word) {
  asm volatile("st.global.cs.u8 [%0], %1;" ::"l"(p), "r"((kv_u32)word) : "memory");
}
KV_DEVICE void kv_load_row(kv_thread &, kv_u64 p, kv_word4 &word) {
  kv_u32 x, y, z, w;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "l"(p));
  word = kv_word4{x, y, z, w};
}
KV_DEVICE void kv_store_row(kv_thread &, kv_u64 p, kv_word4 word) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

// Every lane's stores are visible to the whole system before lane 0 goes on.
KV_DEVICE void kv_publish_warp() {
  asm volatile("fence.acq_rel.sys;\n\tbar.warp.sync 0xffffffff;" ::: "memory");
}
KV_DEVICE void kv_atomic_add(kv_thread &, kv_u64 p, kv_u32 value) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
KV_DEVICE kv_u32 kv_atomic_exchange(kv_thread &, kv_u64 p, kv_u32 value) {
  kv_u32 old;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(value) : "memory");
  return old;
}

#elif defined(__AMDGCN__)

// gfx10 and later run wavefronts of 32 here, older ones 64: clang's defaults for these targets.
#define KV_WARP ((kv_u32)__builtin_amdgcn_wavefrontsize())
#define KV_KERNEL(name, args) \
  extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, 1024))) void name(const args a)
#define KV_ENTER kv_thread{(kv_u32)__builtin_amdgcn_workitem_id_x(), (kv_u32)__builtin_amdgcn_workgroup_id_x()}

template <class Word>
KV_DEVICE void kv_load_row(kv_thread &, kv_u64 p, Word &word) {
  word = __builtin_nontemporal_load((const KV_GLOBAL Word *)p);
}
template <class Word>
KV_DEVICE void kv_store_row(kv_thread &, kv_u64 p, Word word) {
  __builtin_nontemporal_store(word, (KV_GLOBAL Word *)p);
}
// A wavefront runs in step and its counter of outstanding stores is shared: one release fence covers every lane.
KV_DEVICE void kv_publish_warp() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, ""); }
KV_DEVICE void kv_atomic_add(kv_thread &, kv_u64 p, kv_u32 value) {
  __hip_atomic_fetch_add((KV_GLOBAL kv_u32 *)p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
KV_DEVICE kv_u32 kv_atomic_exchange(kv_thread &, kv_u64 p, kv_u32 value) {
  return __hip_atomic_exchange((KV_GLOBAL kv_u32 *)p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

#else

#define KV_WARP 32u
#define KV_KERNEL(name, args) static void name(const args &a, kv_thread me)
#define KV_ENTER me

KV_DEVICE bool kv_within(const kv_range &range, kv_u64 p, kv_u64 nbytes) {
  return p >= range.begin && p < range.end && nbytes <= range.end - p;
}
// A real GPU would fault on an address outside its memory: so does the stand-in, at the first one, and stays faulted.
KV_DEVICE bool kv_reachable(kv_thread &me, kv_u64 p, kv_u64 nbytes, kv_u32 is_write) {
  if (kv_within(me.last, p, nbytes)) return !me.fault->happened;
  for (kv_u32 i = 0; i < me.n_ranges; i++)
    if (kv_within(me.ranges[i], p, nbytes)) {
      me.last = me.ranges[i];
      return !me.fault->happened;
    }
  if (!me.fault->happened) *me.fault = kv_fault{p, nbytes, is_write, 1};
  return false;
}
template <class Word>
KV_DEVICE void kv_load_row(kv_thread &me, kv_u64 p, Word &word) {
  if (kv_reachable(me, p, sizeof(Word), 0)) word = *(const Word *)p;
}
template <class Word>
KV_DEVICE void kv_store_row(kv_thread &me, kv_u64 p, Word word) {
  if (kv_reachable(me, p, sizeof(Word), 1)) *(Word *)p = word;
}
// Threads of a warp run one after the other, lane 0 last (see kv_host_launch), so lane 0 already comes after them all.
KV_DEVICE void kv_publish_warp() { __atomic_thread_fence(__ATOMIC_RELEASE); }
KV_DEVICE void kv_atomic_add(kv_thread &me, kv_u64 p, kv_u32 value) {
  if (kv_reachable(me, p, sizeof value, 1)) __atomic_fetch_add((kv_u32 *)p, value, __ATOMIC_RELEASE);
}
KV_DEVICE kv_u32 kv_atomic_exchange(kv_thread &me, kv_u64 p, kv_u32 value) {
  return kv_reachable(me, p, sizeof value, 1) ? __atomic_exchange_n((kv_u32 *)p, value, __ATOMIC_RELAXED) : value;
}

#endif

// Small reads that many lanes share (tables, indices): through the caches. Small writes: the error record.
template <class T>
KV_DEVICE T kv_read([[maybe_unused]] kv_thread &me, kv_u64 p) {
#if defined(__NVPTX__) || defined(__AMDGCN__)
  return *(const KV_GLOBAL T *)p;
#else
  return kv_reachable(me, p, sizeof(T), 0) ? *(const T *)p : T(0);
#endif
}
template <class T>
KV_DEVICE void kv_write([[maybe_unused]] kv_thread &me, kv_u64 p, T value) {
#if defined(__NVPTX__) || defined(__AMDGCN__)
  *(volatile KV_GLOBAL T *)p = value;
#else
  if (kv_reachable(me, p, sizeof(T), 1)) *(volatile T *)p = value;
#endif
}
