// MLPs of three products with packed weights, one of which is a gate.

#include "functions.h"
#include "kernels.h"
#include "product.h"

// gated [rows, columns] = activation(x gate^T) * (x up^T) for packed weights [columns, steps]. It is laid out as
// lay_out would, for the product that follows. Returns when all of it is there.
static void multiply_gated(
    const struct cut *cut, const float *laid_out, const float *gate, const float *up, int activation, long columns,
    long steps, float *gated)
{
    // In floats. C knows no difference of pointers into different memory.
    const long from_gate_to_up = ((intptr_t)up - (intptr_t)gate) / (intptr_t)sizeof(float);
#pragma omp for
    for (long column = 0; column < columns; column += LANES)
        for (long first = 0; first < cut->rows; first += cut->strip) {
            const long count = rows_of(cut, first), offset = column * steps;
            const float *part = laid_out + first * steps;
            // Two panels: of each row, the gate's sum and then up's. One: the gate's of all rows, and then up's.
            lanes sums[ROWS_BY_1 * 2];
            if (cut->panels == 1) {
                tile_by_1(count, part, 1, count, gate + offset, steps, sums);
                tile_by_1(count, part, 1, count, up + offset, steps, sums + count);
            } else
                tile_by_2(count, part, 1, count, gate + offset, from_gate_to_up, steps, sums, 2);
            for (long row = 0; row < count; row++) {
                const long at = cut->panels == 1 ? row : 2 * row, beside = cut->panels == 1 ? count : 1;
                const lanes opened = sums[at], through = sums[at + beside];
                const lanes result = (activation == SILU ? silu_of(opened) : gelu_tanh_of(opened)) * through;
                for (long lane = 0; lane < LANES && column + lane < columns; lane++)
                    gated[first * columns + (column + lane) * count + row] = result[lane];
            }
        }
}

// y [rows, columns] = (activation(x gate^T) * (x up^T)) down^T for packed weights gate and up [inner, steps] and down
// [columns, inner]; room for rows * (steps + inner) floats.
void packed_gated_mlp(
    const float *x, const float *gate, const float *up, const float *down, int activation, float *y, long rows,
    long columns, long inner, long steps, float *room, int threads)
{
    if (!rows) return;
    const struct cut how = cut_of(rows);
    float *gated = room + rows * steps;
#pragma omp parallel num_threads(threads)
    {
        lay_out(&how, x, steps, room);
        multiply_gated(&how, room, gate, up, activation, inner, steps, gated);
        multiply(&how, gated, down, 0, columns, inner, y, columns);
    }
}
