-- ARGV: request id, epoch, worker id, term, tokens, most tokens promised there before. Returns 1 if the place is taken.
-- An answer that is decoded takes a place at another worker, too, under a later epoch, until its migration ends.
local id, epoch, worker, term, tokens = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], tonumber(ARGV[5])
local request = read(key('req:', id))
if not request.state or ENDS[request.state] or request.prefill_held == '1' or request.decode_held ~= '1'
  or tonumber(request.epoch) >= epoch then return 0 end
if tonumber(request.to_epoch or 0) > epoch then return 0 end
if request.to == worker and request.to_term == term and tonumber(request.to_epoch) == epoch then return 1 end
drop_destination(id, request)
local row = redis.call('HMGET', key('node:', worker), 'term', 'until', 'draining', 'reserved', 'beyond_reserved')
if row[1] ~= term or tonumber(row[2]) <= NOW_MS or row[3] ~= '0' then return 0 end
local reserved = row[4] + row[5]
if reserved > 0 and reserved > tonumber(ARGV[6]) then return 0 end
redis.call('HSET', key('req:', id), 'to', worker, 'to_term', term, 'to_tokens', tokens, 'to_epoch', epoch)
credit(worker, term, 'reserved', 'decodes', tokens, 1)
return 1
