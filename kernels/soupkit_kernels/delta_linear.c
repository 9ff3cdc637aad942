/* The multi-variant linear on a CPU, over the deltas of an arena (arena.py):
     y[t] = x[t] (W + sum_p diag(scale_v[p]) S_v[p] diag(column_v[p]))^T,  v = index[t]

   Three entry points, called from native.py through ctypes:
     soupkit_decode       fused: W and the bits are read once for a few tokens of any variants;
     soupkit_signs        products with single planes, without W;
     soupkit_reconstruct  rows of the weight with the signs of one variant, for a matrix product.
   Sums are float32. What a row of y holds does not depend on the other tokens, on the number of
   threads or on how rows are split: each (row, token) pair has its own accumulators, which run over
   K in one order. Bits are LSB-first along K (bitpack.py); bits beyond K are never used.
   Column scales belong to inputs: soupkit_decode leaves a variant that has them to soupkit_signs.
   Not here: low-rank parts; the loops over K (delta_rows.h), in the instruction sets of
   delta_isas.h. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum kind { F32, BF16, F16, NUM_KINDS };
enum mode {
    BASE,   /* the base alone */
    SHARED, /* the base, and one plane for all tokens */
    EACH,   /* the base, and a plane for each token */
    SHARED_SIGNS, /* one plane for all tokens, without the base */
    SIGNS,        /* a plane for each token, without the base */
    NUM_MODES
};
/* A pass takes 1 << size tokens. GROUP_ROWS is a multiple of the rows that any pass takes. */
enum { NUM_SIZES = 3, MAX_TOKENS = 4, MAX_PAIRS = 12, GROUP_ROWS = 12 };
enum { MAX_ROWS = 4, MAX_BYTES = 64, MAX_PLANES = 8 };

/* Row b: the eight signs of byte b as +-1. In the first cache; `soupkit_start` fills it. */
static float sign_table[256][8];

typedef float quad __attribute__((vector_size(16)));

/* Columns of the table of an arena, as arena.py has them. Offsets are bytes, -1 where there is
   nothing; an empty slot has 0 planes. */
enum field { PLANES, PACKED, SCALE, COLUMN, RANK, DOWN, UP, NUM_FIELDS };

struct arena {
    const char *data;
    const int64_t *table; /* [slots, NUM_FIELDS] */
    int64_t num_rows, width, row_bytes; /* of a layer: N, K; of a row of bits */
};

INLINE const uint8_t *bits_of(
    const struct arena *arena, const int64_t *slot, int64_t plane, int64_t row
) {
    return (const uint8_t *)arena->data + slot[PACKED]
        + (plane * arena->num_rows + row) * arena->row_bytes;
}

INLINE const float *scales_of(
    const struct arena *arena, const int64_t *slot, int64_t plane, int64_t row
) {
    return (const float *)(arena->data + slot[SCALE]) + plane * arena->num_rows + row;
}

/* A few rows times a few tokens. Strides are in bytes and go from row to row, of x from token to
   token. Pairs are numbered row * tokens + token. */
struct block {
    const char *weight, *x;
    const uint8_t *bits[MAX_TOKENS]; /* SHARED: the first is read; BASE: NULL */
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
    for (int r = 0; weight_bytes && r < num_rows; r++)
        memcpy(
            rest->weight[r], block->weight + r * block->weight_stride + k * weight_bytes,
            left * weight_bytes
        );
    for (int m = 0; m < num_tokens; m++) {
        memcpy(rest->x[m], block->x + m * block->x_stride + k * x_bytes, left * x_bytes);
        if (!block->bits[m]) continue; /* BASE */
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

/* What a row of an effective weight is the sum of. */
struct parts {
    const char *weight;
    const uint8_t *bits[MAX_PLANES];
    float scale[MAX_PLANES];
    const float *column[MAX_PLANES]; /* NULL: ones, in all planes */
    int64_t width;
    int planes;
};

typedef void (*effective_fn)(const struct parts *, char *out);

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
    const char *weight; /* NULL: planes alone */
    int64_t weight_stride;
    struct arena arena;
    const int64_t *index;
    const int64_t *plane; /* of each token; NULL: all that its variant has */
    float *y; /* [num_tokens, num_rows] */
    int64_t slot, first_row; /* of soupkit_reconstruct, as out */
    char *out;
    int64_t run_rows, next_row;
};

/* The slot of a token, if it has signs that belong here. */
static const int64_t *slot_of(const struct work *work, int64_t token) {
    const int64_t v = work->index[token];
    const int64_t *slot = work->arena.table + v * NUM_FIELDS;
    if (v < 0 || !slot[PLANES] || (work->weight && slot[COLUMN] >= 0)) return NULL;
    return slot;
}

/* The bits of each token's plane. A token without it runs over another's: its sums are not read.
   Returns how many differ: 0 if no token has any, 1 if all have the same. */
static int point_at_bits(
    const struct work *work, const int64_t *const *slots, const int64_t *planes, int tokens,
    int64_t row, const uint8_t **bits
) {
    const uint8_t *any = NULL;
    int is_shared = 1;
    for (int m = 0; m < tokens; m++) {
        const int has = slots[m] && planes[m] < slots[m][PLANES];
        bits[m] = has ? bits_of(&work->arena, slots[m], planes[m], row) : NULL;
        if (!has) continue;
        if (any && any != bits[m]) is_shared = 0;
        any = bits[m];
    }
    for (int m = 0; m < tokens; m++)
        if (!bits[m]) bits[m] = any;
    return !any ? 0 : is_shared ? 1 : 2;
}

/* 1 << size tokens from `first`, `rows` rows from `begin`: as many as the pass takes, or 1. */
static void decode_block(
    const struct work *work, int64_t first, int size, int64_t begin, int rows
) {
    const int tokens = 1 << size, step = work->isa->num_rows[size], is_whole = rows == step;
    const int64_t *slots[MAX_TOKENS];
    int64_t planes[MAX_TOKENS], num_planes = 1;
    float base[MAX_PAIRS], sign[MAX_PAIRS];
    for (int m = 0; m < tokens; m++) {
        slots[m] = slot_of(work, first + m);
        if (!work->plane && slots[m] && slots[m][PLANES] > num_planes) num_planes = slots[m][PLANES];
    }
    for (int64_t p = 0; p < num_planes; p++) {
        const int has_base = work->weight && !p;
        struct block block = {
            .weight = work->weight ? work->weight + begin * work->weight_stride : NULL,
            .x = work->x + first * work->x_stride, .x_stride = work->x_stride,
            /* One row alone: the pass takes it again in place of those that do not exist. */
            .weight_stride = is_whole ? work->weight_stride : 0,
            .bits_stride = is_whole ? work->arena.row_bytes : 0,
            .width = work->width, .base = base, .sign = sign,
        };
        for (int m = 0; m < tokens; m++) planes[m] = work->plane ? work->plane[first + m] : p;
        const int differ = point_at_bits(work, slots, planes, tokens, begin, block.bits);
        const int mode = has_base
            ? (differ > 1 ? EACH : differ ? SHARED : BASE) : differ > 1 ? SIGNS : SHARED_SIGNS;
        if (has_base || differ) work->isa->rows[work->kind][mode][size](&block);
        for (int m = 0; m < tokens; m++) {
            const int has = slots[m] && planes[m] < slots[m][PLANES];
            const float *scale = has ? scales_of(&work->arena, slots[m], planes[m], begin) : NULL;
            float *y = work->y + (first + m) * work->num_rows + begin;
            for (int r = 0; r < rows; r++) {
                const float old = p ? y[r] : has_base ? base[r * tokens + m] : 0;
                y[r] = old + (has ? scale[r] * sign[r * tokens + m] : 0);
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

static void effective_row(const struct work *work, int64_t row) {
    const struct arena *arena = &work->arena;
    const int64_t *slot = arena->table + work->slot * NUM_FIELDS, at = work->first_row + row;
    struct parts parts = {
        .weight = work->weight + row * work->weight_stride, .width = work->width,
        .planes = (int)slot[PLANES],
    };
    for (int p = 0; p < parts.planes; p++) {
        parts.bits[p] = bits_of(arena, slot, p, at);
        parts.scale[p] = *scales_of(arena, slot, p, at);
        parts.column[p] = slot[COLUMN] < 0
            ? NULL : (const float *)(arena->data + slot[COLUMN]) + p * work->width;
    }
    const int64_t bytes = work->width * (work->kind == F32 ? 4 : 2);
    work->isa->effective[work->kind](&parts, work->out + row * bytes);
}

static void effective_body(void *data) {
    struct work *work = data;
    for (;;) {
        const int64_t begin = __atomic_fetch_add(&work->next_row, work->run_rows, __ATOMIC_RELAXED);
        for (int64_t row = begin; row < begin + work->run_rows; row++) {
            if (row >= work->num_rows) return;
            effective_row(work, row);
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
    int64_t isa, int64_t kind, int64_t threads, parallel_fn parallel, const struct arena *arena,
    int64_t num_tokens, const void *x, int64_t x_stride, const void *weight, int64_t weight_stride,
    const int64_t *index, float *y
) {
    struct work work = {
        .isa = isas[isa], .kind = kind, .arena = *arena, .num_tokens = num_tokens,
        .num_rows = arena->num_rows, .width = arena->width, .x = x, .x_stride = x_stride,
        .weight = weight, .weight_stride = weight_stride, .index = index, .y = y,
    };
    run(decode_body, &work, parallel, threads);
}

/* y[i] = scale (S x[i]), plane[i] of the variant index[i]; its column scales are in x already. */
void soupkit_signs(
    int64_t isa, int64_t kind, int64_t threads, parallel_fn parallel, const struct arena *arena,
    int64_t num_tokens, const void *x, int64_t x_stride, const int64_t *index,
    const int64_t *plane, float *y
) {
    struct work work = {
        .isa = isas[isa], .kind = kind, .arena = *arena, .num_tokens = num_tokens,
        .num_rows = arena->num_rows, .width = arena->width, .x = x, .x_stride = x_stride,
        .index = index, .plane = plane, .y = y,
    };
    run(decode_body, &work, parallel, threads);
}

/* Rows first_row .. of the base and the signs of a slot; weight and out begin at the first of them.
   `out` [num_rows, width], contiguous, in the weight's dtype; rounded once to nearest even. */
void soupkit_reconstruct(
    int64_t isa, int64_t kind, int64_t threads, parallel_fn parallel, const struct arena *arena,
    int64_t slot, int64_t first_row, int64_t num_rows, const void *weight, int64_t weight_stride,
    void *out
) {
    struct work work = {
        .isa = isas[isa], .kind = kind, .arena = *arena, .slot = slot, .first_row = first_row,
        .num_rows = num_rows, .width = arena->width, .weight = weight,
        .weight_stride = weight_stride, .out = out,
    };
    run(effective_body, &work, parallel, threads);
}
