// Interpolates the tables in double precision when the library is loaded.
#include "cpu/normal_tables.h"

#include <cmath>

namespace fastbert {
namespace {

double tail(double z) { return 0.5 * std::erfc(z * std::sqrt(0.5)); }

double slope(double z) {
  const double density = std::exp(-0.5 * z * z) / std::sqrt(2 * std::acos(-1.0));
  return tail(z) - z * density;
}

// The polynomial through f at the Chebyshev nodes of each piece: Newton's divided differences, then
// their products multiplied out.
template <int kDegree>
NormalTable<kDegree> interpolated(double (*f)(double)) {
  NormalTable<kDegree> table{};
  for (int piece = 0; piece < 31; ++piece) {
    double node[kDegree + 1], difference[kDegree + 1];
    for (int i = 0; i <= kDegree; ++i) {
      node[i] = 0.5 * std::cos((i + 0.5) / (kDegree + 1) * std::acos(-1.0));
      difference[i] = f((piece + node[i]) / kNormalPieces);
    }
    for (int order = 1; order <= kDegree; ++order) {
      for (int i = kDegree; i >= order; --i) {
        difference[i] = (difference[i] - difference[i - 1]) / (node[i] - node[i - order]);
      }
    }
    double terms[kDegree + 1] = {difference[kDegree]};
    for (int i = kDegree - 1; i >= 0; --i) {
      for (int d = kDegree - i; d > 0; --d) terms[d] = terms[d - 1] - node[i] * terms[d];
      terms[0] = difference[i] - node[i] * terms[0];
    }
    for (int d = 0; d <= kDegree; ++d) table.terms[d][piece] = static_cast<float>(terms[d]);
  }
  return table;
}

template <int kDegree>
NormalTables<kDegree> both() {
  return {interpolated<kDegree>(tail), interpolated<kDegree>(slope)};
}

}  // namespace

const NormalTables<6> kNormal = both<6>();
const NormalTables<3> kBriefNormal = both<3>();

}  // namespace fastbert
