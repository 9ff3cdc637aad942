/* A few rows times a few tokens, for one instruction set; included once for each.

   The includer defines TARGET, STEP (inputs a step), X_BYTES (of an input), VALUE (a vector of STEP
   inputs), SUM (a vector of float32) and inputs, weights, signs, multiply_add. */

INLINE TARGET void ISA(step)(
    const struct block *at, int64_t k, int kind, int mode, int tokens, int rows, SUM *base,
    SUM *sign
) {
    VALUE value[MAX_TOKENS];
    UNROLL for (int m = 0; m < tokens; m++) value[m] = ISA(inputs)(at->x + m * at->x_stride, k);
    UNROLL for (int r = 0; r < rows; r++) {
        VALUE w, s;
        if (mode < SHARED_SIGNS) {
            w = ISA(weights)(at->weight + r * at->weight_stride, k, kind);
            /* The next rows, into the second cache: without it the arithmetic of several tokens
               waits for memory (../README.md). An address past the end does not fault. */
            __builtin_prefetch(
                at->weight + (r + rows) * at->weight_stride + k * (kind == F32 ? 4 : 2), 0, 2
            );
            UNROLL for (int m = 0; m < tokens; m++)
                base[r * tokens + m] = ISA(multiply_add)(w, value[m], base[r * tokens + m]);
        }
        UNROLL for (int m = 0; mode != BASE && m < tokens; m++) {
            if ((mode != SHARED && mode != SHARED_SIGNS) || !m) s = ISA(signs)(at->bits[m] + r * at->bits_stride, k);
            sign[r * tokens + m] = ISA(multiply_add)(s, value[m], sign[r * tokens + m]);
        }
    }
}

/* The sum of the lanes of each, always in the same order. */
static __attribute__((noinline)) TARGET void ISA(totals)(const SUM *sums, int count, float *out) {
    for (int i = 0; i < count; i++) {
        quad part[sizeof(SUM) / sizeof(quad)];
        memcpy(part, sums + i, sizeof part);
        for (int half = sizeof(SUM) / sizeof(quad) / 2; half; half /= 2)
            for (int j = 0; j < half; j++) part[j] += part[j + half];
        out[i] = (part[0][0] + part[0][2]) + (part[0][1] + part[0][3]);
    }
}

INLINE TARGET void ISA(rows)(struct block *block, int kind, int mode, int tokens, int rows) {
    const int pairs = rows * tokens;
    SUM base[MAX_PAIRS], sign[MAX_PAIRS];
    struct rest rest;
    UNROLL for (int i = 0; i < pairs; i++) base[i] = sign[i] = (SUM){0};
    do {
        /* A copy, which the compiler may keep in registers. */
        struct block at = *block;
        for (int64_t k = 0; k + STEP <= at.width; k += STEP)
            ISA(step)(&at, k, kind, mode, tokens, rows, base, sign);
    } while (block->width % STEP && take_rest(
        block, &rest, STEP, X_BYTES, mode >= SHARED_SIGNS ? 0 : kind == F32 ? 4 : 2, tokens, rows
    ));
    ISA(totals)(base, mode >= SHARED_SIGNS ? 0 : pairs, block->base);
    ISA(totals)(sign, mode == BASE ? 0 : pairs, block->sign);
}

#ifndef ROWS
#define ROWS_NAME(kind, mode, size) ISA(rows_##kind##_##mode##_##size)
#define ROWS(kind, mode, size, num_rows) \
    static TARGET void ROWS_NAME(kind, mode, size)(struct block *block) { \
        ISA(rows)(block, kind, mode, 1 << size, num_rows); \
    }
#define TABLE(kind, mode) \
    {ROWS_NAME(kind, mode, 0), ROWS_NAME(kind, mode, 1), ROWS_NAME(kind, mode, 2)}
#endif
