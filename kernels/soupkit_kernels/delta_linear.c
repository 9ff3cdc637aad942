/* The multi-variant linear on a CPU:
     y[t] = x[t] (W + sum_p diag(scale_v[p]) S_v[p])^T,  v = index[t]

   Two entry points, called from native.py through ctypes:
     soupkit_decode       fused: W and the bits are read once for a few tokens of any variants;
     soupkit_reconstruct  rows of the effective weight of one variant, for a matrix product.
   Sums are float32. What a row of y holds does not depend on the other tokens, on the number of
   threads or on how rows are split: each (row, token) pair has its own accumulators, which run over
   K in one order. Bits are LSB-first along K (bitpack.py); bits beyond K are never used.
   Not here: the loops over K (delta_rows.h), in the instruction sets of delta_isas.h. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum kind { F32, BF16, F16, NUM_KINDS };
enum mode {
    SHARED, /* the base, and one variant for all tokens */
    EACH,   /* the base, and a variant for each token */
    SIGNS,  /* a variant for each token, without the base: planes after the first */
    NUM_MODES
};
/* A pass takes 1 << size tokens. GROUP_ROWS is a multiple of the rows that any pass takes. */
enum { NUM_SIZES = 3, MAX_TOKENS = 4, MAX_PAIRS = 12, GROUP_ROWS = 12 };
enum { MAX_ROWS = 4, MAX_BYTES = 64, MAX_PLANES = 8 };

/* Row b: the eight signs of byte b as +-1. In the first cache; `soupkit_start` fills it. */
static float sign_table[256][8];

typedef float quad __attribute__((vector_size(16)));

/* As native.py fills it: 8 bytes a field; strides of bits in bytes, of scales in floats. */
struct variant {
    const uint8_t *bits;
    int64_t bits_plane;
    const float *scale;
    int64_t scale_plane, scale_row;
    int64_t planes;
};

/* A few rows times a few tokens. Strides are in bytes and go from row to row, of x from token to
   token. Pairs are numbered row * tokens + token. */
struct block {
    const char *weight, *x;
    const uint8_t *bits[MAX_TOKENS]; /* SHARED: only the first is read */
    int64_t weight_stride, x_stride, bits_stride;
    int64_t width; /* K */
    float *base, *sign;
};

/* The inputs beyond the last whole step, copied and filled up with zeros. */
struct rest {
    char weight[MAX_ROWS][MAX_BYTES], x[MAX_TOKENS][MAX_BYTES];
    uint8_t bits[MAX_TOKENS][MAX_ROWS][4];
};

/* Points the block at what is left beyond its last whole step, as one whole step.
   weight_bytes: of one weight; 0 where none is read. */
static __attribute__((noinline)) int take_rest(
    struct block *block, struct rest *rest, int step, int x_bytes, int weight_bytes, int num_tokens,
    int num_rows
) {
    const int64_t left = block->width % step, k = block->width - left;
    memset(rest, 0, sizeof *rest);
    for (int r = 0; r < num_rows; r++)
        memcpy(
            rest->weight[r], block->weight + r * block->weight_stride + k * weight_bytes,
            left * weight_bytes
        );
    for (int m = 0; m < num_tokens; m++) {
        memcpy(rest->x[m], block->x + m * block->x_stride + k * x_bytes, left * x_bytes);
        for (int r = 0; r < num_rows; r++)
            memcpy(
                rest->bits[m][r], block->bits[m] + r * block->bits_stride + k / 8, (left + 7) / 8
            );
        block->bits[m] = rest->bits[m][0];
    }
    block->weight = rest->weight[0];
    block->x = rest->x[0];
    block->weight_stride = block->x_stride = MAX_BYTES;
    block->bits_stride = sizeof rest->bits[0][0];
    block->width = step;
    return 1;
}

typedef void (*rows_fn)(struct block *);
typedef void (*effective_fn)(
    const char *weight, const struct variant *, int64_t row, int64_t bits_stride, int64_t width,
    char *out
);

struct isa {
    rows_fn rows[NUM_KINDS][NUM_MODES][NUM_SIZES];
    int num_rows[NUM_SIZES]; /* that such a pass takes */
    effective_fn effective[NUM_KINDS];
};

#include "delta_isas.h"

/* -- work, shared by threads that take runs of rows until none is left -- */

/* GOMP_parallel of the OpenMP runtime that torch has loaded: its pool, no second runtime. */
typedef void (*parallel_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

struct work {
    const struct isa *isa;
    int64_t kind, num_tokens, num_rows, width;
    const char *x;
    int64_t x_stride;
    const char *weight;
    int64_t weight_stride, bits_stride;
    const struct variant *variants;
    const int64_t *index;
    float *y; /* [num_tokens, num_rows] */
    int64_t run_rows, next_row;
};

/* 1 << size tokens from `first`, `rows` rows from `begin`: as many as the pass takes, or 1. */
static void decode_block(
    const struct work *work, int64_t first, int size, int64_t begin, int rows
) {
    const int tokens = 1 << size, step = work->isa->num_rows[size];
    const struct variant *variant[MAX_TOKENS];
    float base[MAX_PAIRS], sign[MAX_PAIRS];
    int64_t planes = 1;
    int shared = 1;
    for (int m = 0; m < tokens; m++) {
        const int64_t v = work->index[first + m];
        variant[m] = v < 0 ? NULL : work->variants + v;
        shared &= v == work->index[first];
        if (v >= 0 && variant[m]->planes > planes) planes = variant[m]->planes;
    }
    for (int64_t p = 0; p < planes; p++) {
        const int is_whole = rows == step;
        struct block block = {
            .weight = work->weight + begin * work->weight_stride,
            .x = work->x + first * work->x_stride, .x_stride = work->x_stride,
            /* One row alone: the pass takes it again in place of those that do not exist. */
            .weight_stride = is_whole ? work->weight_stride : 0,
            .bits_stride = is_whole ? work->bits_stride : 0,
            .width = work->width, .base = base, .sign = sign,
        };
        for (int m = 0; m < tokens; m++) {
            /* A token without this plane runs over others' bits; its sums are not read. */
            const struct variant *v = variant[m] ? variant[m] : work->variants;
            block.bits[m] =
                v->bits + (p < v->planes ? p : 0) * v->bits_plane + begin * work->bits_stride;
        }
        work->isa->rows[work->kind][p ? SIGNS : shared ? SHARED : EACH][size](&block);
        for (int m = 0; m < tokens; m++) {
            const struct variant *v = variant[m];
            float *y = work->y + (first + m) * work->num_rows + begin;
            for (int r = 0; r < rows; r++) {
                const float add = v && p < v->planes
                    ? v->scale[p * v->scale_plane + (begin + r) * v->scale_row]
                        * sign[r * tokens + m]
                    : 0;
                y[r] = (p ? y[r] : base[r * tokens + m]) + add;
            }
        }
    }
}

static void decode_rows(const struct work *work, int64_t begin, int64_t end) {
    /* A group of rows stays in a near cache while all tokens pass over it. */
    for (int64_t group = begin; group < end; group += GROUP_ROWS) {
        const int64_t stop = end - group < GROUP_ROWS ? end : group + GROUP_ROWS;
        int size = NUM_SIZES - 1;
        for (int64_t token = 0; token < work->num_tokens; token += 1 << size) {
            while (1 << size > work->num_tokens - token) size--;
            const int step = work->isa->num_rows[size];
            int64_t row = group;
            for (; row + step <= stop; row += step) decode_block(work, token, size, row, step);
            for (; row < stop; row++) decode_block(work, token, size, row, 1);
        }
    }
}

static void decode_body(void *data) {
    struct work *work = data;
    for (;;) {
        const int64_t row = __atomic_fetch_add(&work->next_row, work->run_rows, __ATOMIC_RELAXED);
        if (row >= work->num_rows) return;
        const int64_t left = work->num_rows - row;
        decode_rows(work, row, row + (left < work->run_rows ? left : work->run_rows));
    }
}

static void effective_body(void *data) {
    struct work *work = data;
    for (;;) {
        const int64_t begin = __atomic_fetch_add(&work->next_row, work->run_rows, __ATOMIC_RELAXED);
        for (int64_t row = begin; row < begin + work->run_rows; row++) {
            if (row >= work->num_rows) return;
            work->isa->effective[work->kind](
                work->weight + row * work->weight_stride, work->variants, row, work->bits_stride,
                work->width,
                (char *)work->y + row * work->width * (work->kind == F32 ? 4 : 2)
            );
        }
    }
}

static void run(void (*body)(void *), struct work *work, parallel_fn parallel, int64_t threads) {
    /* Runs of whole groups, several a thread, so that a slow thread does not hold up the rest. */
    int64_t rows = work->num_rows / (4 * threads) / GROUP_ROWS * GROUP_ROWS;
    work->run_rows = rows < GROUP_ROWS ? GROUP_ROWS : rows;
    work->next_row = 0;
    if (parallel && threads > 1) parallel(body, work, (unsigned)threads, 0);
    else body(work);
}

/* Strides in bytes; x is float32, for avx512_bf16 it is bfloat16, its rows contiguous. */
void soupkit_decode(
    int64_t isa, int64_t kind, int64_t threads, parallel_fn parallel, int64_t num_tokens,
    int64_t num_rows, int64_t width, const void *x, int64_t x_stride, const void *weight,
    int64_t weight_stride, int64_t bits_stride, const struct variant *variants,
    const int64_t *index, float *y
) {
    struct work work = {
        .isa = isas[isa], .kind = kind, .num_tokens = num_tokens, .num_rows = num_rows,
        .width = width, .x = x, .x_stride = x_stride, .weight = weight,
        .weight_stride = weight_stride, .bits_stride = bits_stride, .variants = variants,
        .index = index, .y = y,
    };
    run(decode_body, &work, parallel, threads);
}

/* `out` [num_rows, width], contiguous, in the weight's dtype; rounded once to nearest even. */
void soupkit_reconstruct(
    int64_t isa, int64_t kind, int64_t threads, parallel_fn parallel, int64_t num_rows,
    int64_t width, const void *weight, int64_t weight_stride, int64_t bits_stride,
    const struct variant *variant, void *out
) {
    struct work work = {
        .isa = isas[isa], .kind = kind, .num_rows = num_rows, .width = width, .weight = weight,
        .weight_stride = weight_stride, .bits_stride = bits_stride, .variants = variant, .y = out,
    };
    run(effective_body, &work, parallel, threads);
}
