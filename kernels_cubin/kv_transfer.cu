// Moves KV-cache rows between two paged memories. One source for CUDA, HIP and the host stand-in.
//
// Both sides are described by the same affine address, in bytes:
//
//   address(component, layer, page, slot, head) =
//       table[layer or page or 0] + offset + page*P + slot*S + layer*L + head*H
//
// The work is cut into tasks: one task is one segment of one contiguous run. Tasks are numbered layer by layer, so a
// layer is complete when its tasks are, whoever did them; `layer_done` counts them. A warp takes a batch of
// neighbouring tasks, has all their loads in flight before its first store, and goes on to its next batch.
#include "kv_platform.h"

#define KV_ABI 1
#define KV_MAX_COMPONENTS 4

// How one component is addressed on one side.
struct kv_side {
  kv_u64 table;   // device address of the base addresses (kv_u64 each)
  kv_i64 offset;  // of the component, and of the first head that moves
  kv_i64 page, slot, layer, head;
};

struct kv_component {
  kv_side src, dst;
  kv_u32 run_words;  // one contiguous run
  kv_u32 segments;   // tasks a run
  kv_u32 heads, slots;
  kv_u32 tasks;  // n_items * slots * heads * segments
  kv_u32 reserved;
};

// How an index array selects rows on one side.
struct kv_selector {
  kv_u64 indices;   // device address
  kv_u32 limit;     // an index is valid below this
  kv_u32 split;     // page = index / split, slot = index % split
  kv_u32 table_by;  // which number selects the table entry: 0 none, 1 layer, 2 page
  kv_u32 layer_begin;
};

struct kv_transfer_args {
  kv_component component[KV_MAX_COMPONENTS];
  kv_selector src, dst;
  kv_u64 layer_done;    // kv_u32 a layer, only ever added to; 0: nobody asks
  kv_u64 error_record;  // kv_error_record in page-locked host memory
  kv_u64 error_claim;   // kv_u32 in device memory: the transfer that last reported
  kv_u32 error_epoch;   // this transfer's number, never 0
  kv_u32 n_components, n_layers;
  kv_u32 tasks_per_layer;
  kv_u32 lanes_log2;  // lanes that share a segment
  kv_u32 narrow;      // 0: long runs, few at a time; 1: runs of at most a warp of words, many at a time
  kv_u32 n_warps, warps_per_cta;
};

struct kv_error_record {
  kv_i64 value;
  kv_u64 position;
  kv_u32 side;  // 1 source, 2 destination
  kv_u32 code;  // 0 none, 1 index out of range; written last
};

// Runs in flight a lane group, and words of a run a lane, for long and for short runs (abi.py has the same numbers).
#define KV_LONG_RUNS 2
#define KV_SHORT_RUNS 4
template <class Word> struct kv_long { static const int words = 8; };
template <> struct kv_long<kv_word4> { static const int words = 4; };

struct kv_task {
  kv_u64 src, dst;
  kv_u32 words;  // 0: nothing to move
};

// One reporter wins, so that position and value belong together.
KV_DEVICE void kv_report(kv_thread &me, const kv_transfer_args &a, kv_u32 side, kv_u64 position, kv_i64 value) {
  if (kv_atomic_exchange(me, a.error_claim, a.error_epoch) == a.error_epoch) return;
  kv_write<kv_i64>(me, a.error_record, value);
  kv_write<kv_u64>(me, a.error_record + 8, position);
  kv_write<kv_u32>(me, a.error_record + 16, side);
  kv_write<kv_u32>(me, a.error_record + 20, 1);
}

KV_DEVICE kv_u64 kv_address(kv_thread &me, const kv_side &s, const kv_selector &by, kv_u32 index, kv_u32 layer,
                            kv_u32 slot, kv_u32 head) {
  kv_u32 page = index, first_slot = 0;
  if (by.split > 1) {
    page = index / by.split;
    first_slot = index - page * by.split;
  }
  layer += by.layer_begin;
  const kv_u32 entry = by.table_by == 2 ? page : by.table_by == 1 ? layer : 0;
  return kv_read<kv_u64>(me, s.table + 8ull * entry) + s.offset + page * s.page + (kv_i64)(first_slot + slot) * s.slot +
         layer * s.layer + head * s.head;
}

// segment_words: words of a run that one task moves.
template <class Word, class Index>
KV_DEVICE kv_task kv_resolve(kv_thread &me, const kv_transfer_args &a, kv_u32 number, kv_u32 segment_words) {
  const kv_u32 layer = number / a.tasks_per_layer;
  kv_u32 rest = number - layer * a.tasks_per_layer, c = 0;
  while (rest >= a.component[c].tasks) rest -= a.component[c++].tasks;
  const kv_component &k = a.component[c];
  kv_u32 segment = 0, head = 0, slot = 0;
  if (k.segments > 1) segment = rest % k.segments, rest /= k.segments;
  if (k.heads > 1) head = rest % k.heads, rest /= k.heads;
  if (k.slots > 1) slot = rest % k.slots, rest /= k.slots;

  const Index src = kv_read<Index>(me, a.src.indices + (kv_u64)rest * sizeof(Index));
  const Index dst = kv_read<Index>(me, a.dst.indices + (kv_u64)rest * sizeof(Index));
  if (src < 0 || dst < 0) return kv_task{0, 0, 0};
  const bool bad_src = (kv_u64)src >= a.src.limit;
  if (bad_src || (kv_u64)dst >= a.dst.limit) {
    kv_report(me, a, bad_src ? 1 : 2, rest, bad_src ? src : dst);
    return kv_task{0, 0, 0};
  }
  const kv_u32 done = segment * segment_words, left = k.run_words - done;
  return kv_task{kv_address(me, k.src, a.src, (kv_u32)src, layer, slot, head) + (kv_u64)done * sizeof(Word),
                 kv_address(me, k.dst, a.dst, (kv_u32)dst, layer, slot, head) + (kv_u64)done * sizeof(Word),
                 left < segment_words ? left : segment_words};
}

KV_DEVICE void kv_signal(kv_thread &me, const kv_transfer_args &a, kv_u32 lane, kv_u32 layer, kv_u32 tasks) {
  kv_publish_warp();
  if (lane == 0) kv_atomic_add(me, a.layer_done + 4ull * layer, tasks);
}

template <class Word, class Index, int RUNS, int WORDS>
KV_DEVICE void kv_move(const kv_transfer_args &a, kv_thread me) {
  const kv_u32 lane = me.thread % KV_WARP, lanes = 1u << a.lanes_log2;
  const kv_u32 groups = KV_WARP >> a.lanes_log2, group = lane >> a.lanes_log2, first = lane & (lanes - 1);
  const kv_u32 batch = groups * RUNS;
  const kv_u32 total = a.tasks_per_layer * a.n_layers;  // below 2**31: the sums below cannot wrap
  const kv_u32 warp = me.cta * a.warps_per_cta + me.thread / KV_WARP;
  kv_u32 open_layer = 0, open_tasks = 0;  // done and not yet counted, the same in every lane

  for (kv_u32 begin = warp * batch; begin < total; begin += a.n_warps * batch) {
    Word row[RUNS][WORDS];
    kv_task task[RUNS];
#pragma unroll
    for (int r = 0; r < RUNS; r++) {
      const kv_u32 number = begin + r * groups + group;
      task[r].words = 0;
      if (number < total) task[r] = kv_resolve<Word, Index>(me, a, number, lanes * WORDS);
    }
#pragma unroll
    for (int r = 0; r < RUNS; r++)
#pragma unroll
      for (int w = 0; w < WORDS; w++)
        if (first + w * lanes < task[r].words) kv_load_row(me, task[r].src + (first + w * lanes) * sizeof(Word), row[r][w]);
#pragma unroll
    for (int r = 0; r < RUNS; r++)
#pragma unroll
      for (int w = 0; w < WORDS; w++)
        if (first + w * lanes < task[r].words) kv_store_row(me, task[r].dst + (first + w * lanes) * sizeof(Word), row[r][w]);

    if (!a.layer_done) continue;
    const kv_u32 end = begin + batch < total ? begin + batch : total;
    for (kv_u32 at = begin; at < end;) {
      const kv_u32 layer = at / a.tasks_per_layer;
      const kv_u32 layer_end = (layer + 1) * a.tasks_per_layer, upto = layer_end < end ? layer_end : end;
      if (layer != open_layer && open_tasks) {
        kv_signal(me, a, lane, open_layer, open_tasks);
        open_tasks = 0;
      }
      open_layer = layer;
      open_tasks += upto - at;
      at = upto;
    }
  }
  if (open_tasks) kv_signal(me, a, lane, open_layer, open_tasks);
}

template <class Word, class Index>
KV_DEVICE void kv_transfer(const kv_transfer_args &a, kv_thread me) {
  if (a.narrow)
    kv_move<Word, Index, KV_SHORT_RUNS, 1>(a, me);
  else
    kv_move<Word, Index, KV_LONG_RUNS, kv_long<Word>::words>(a, me);
}

#define KV_VARIANT(name, word, index) \
  KV_KERNEL(name, kv_transfer_args) { kv_transfer<word, index>(a, KV_ENTER); }
KV_VARIANT(kv_transfer_w16_i64, kv_word4, kv_i64)
KV_VARIANT(kv_transfer_w8_i64, kv_u64, kv_i64)
KV_VARIANT(kv_transfer_w4_i64, kv_u32, kv_i64)
KV_VARIANT(kv_transfer_w1_i64, kv_u8, kv_i64)
KV_VARIANT(kv_transfer_w16_i32, kv_word4, kv_i32)
KV_VARIANT(kv_transfer_w8_i32, kv_u64, kv_i32)
KV_VARIANT(kv_transfer_w4_i32, kv_u32, kv_i32)
KV_VARIANT(kv_transfer_w1_i32, kv_u8, kv_i32)

static_assert(sizeof(kv_side) == 48 && sizeof(kv_component) == 120 && sizeof(kv_selector) == 24, "abi.py");
static_assert(sizeof(kv_transfer_args) == 584 && sizeof(kv_error_record) == 24, "abi.py");

#if !defined(__NVPTX__) && !defined(__AMDGCN__)
#include "kv_host.h"
#endif
