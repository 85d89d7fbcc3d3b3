#include "worker/model/config.h"

#include "worker/model/parameters.h"

namespace octavo {

double TrainFlopsPerToken(const ModelConfig& model, std::int64_t sequence_length) {
  // The embedding is a look-up, not a product; a tied table is used once, by the head.
  const double active = static_cast<double>(CountParameters(model).active) -
                        (model.tied_embeddings ? 0.0
                                               : static_cast<double>(model.vocab) *
                                                     static_cast<double>(model.hidden));
  return 6.0 * active + 6.0 * static_cast<double>(model.layers) *
                            static_cast<double>(sequence_length) *
                            static_cast<double>(model.heads) * static_cast<double>(model.head_dim);
}

}  // namespace octavo
